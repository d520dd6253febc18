"""A load on an OpenAI server: requests at the times of a plan, each answer timed as it streams.

Open loop: a request is sent when its time has come, however many are still running, because
users do not wait for each other. What a request is told from is its stream alone:

- its first token is the first *content*, not the chunk that only names a role;
- a gap between tokens is none of the time to the first one;
- what was refused, broken off or ended without a finish has failed, and is in no latency.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import xxhash

LATE_S = 0.05
"""A request that goes out later than that was held up by the client."""
TOKEN_IDS = (1000, 40_000)
"""Prompts are of ids in between, drawn by the seed; a model needs so many."""


class Planned(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Outcome(NamedTuple):
    planned: Planned
    sent_s: float
    """Since the start of the run."""
    error: str = ""
    """Empty: every token came, and a finish."""
    first_s: float = 0.0
    """From sending to the first content."""
    last_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Between two events with content."""
    tokens: int = 0
    """As the server counted them."""
    id: str = ""
    """The server's name for the answer."""
    text_digest: str = ""
    """xxh3-64 of the text, in hex: equal texts, equal digests."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None with fewer than two."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


async def play(
    url: str, model: str, plan: Sequence[Planned], *, seed: int = 0, timeout_s: float = 600.0
) -> list[Outcome]:
    """Outcomes in the order of the plan. `url` is the server's root."""
    random = Random(seed)
    started = perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for one in plan:
                await asyncio.sleep(max(0.0, started + one.at_s - perf_counter()))
                body = _body(model, one, prompt_of(one, random))
                sent = _one(session, f"{url}/v1/completions", body, one, started)
                running.append(tasks.create_task(sent))
        return [task.result() for task in running]


def prompt_of(one: Planned, random: Random) -> list[int]:
    """Drawn for one request after the other, so that a seed gives a plan's prompts again."""
    return [random.randrange(*TOKEN_IDS) for _ in range(one.prompt_tokens)]


def _body(model: str, one: Planned, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": one.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _one(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], one: Planned, started: float
) -> Outcome:
    sent = perf_counter()
    since_start = sent - started
    try:
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                return Outcome(one, since_start, f"{answer.status} {await _code(answer)}")
            return await timed(_events(answer), one, since_start, sent)
    except TimeoutError:
        return Outcome(one, since_start, "timeout")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Outcome(one, since_start, type(error).__name__)


async def _code(answer: aiohttp.ClientResponse) -> str:
    try:
        body = await answer.json()
        return str(body["error"]["code"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError):
        return "without a code"


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """(when it was read, event), `[DONE]` left out. A space after `data:` is optional."""
    async for line in answer.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data != b"[DONE]":
                yield perf_counter(), json.loads(data)


async def timed(
    events: AsyncIterator[tuple[float, dict[str, Any]]],
    one: Planned,
    since_start: float,
    sent: float,
) -> Outcome:
    first = last = 0.0
    gaps: list[float] = []
    tokens, finish, error, name = 0, None, "", ""
    text = xxhash.xxh3_64()
    async for when, event in events:
        name = event.get("id") or name
        if "error" in event:
            error = str(event["error"].get("code") or "error")
        for choice in event.get("choices", ()):
            if content := _content(choice):
                text.update(content.encode())
                if first:
                    gaps.append(when - last)
                first, last = first or when, when
            finish = choice.get("finish_reason") or finish
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not error and finish is None:
        error = "ended without a finish"
    if not error and not first:
        # All of its tokens are half characters or specials: it has no text to time.
        error = "no content"
    if error:
        return Outcome(one, since_start, error, id=name)
    times = (first - sent, last - sent, tuple(gaps))
    return Outcome(one, since_start, "", *times, tokens, name, text.hexdigest())


def _content(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
