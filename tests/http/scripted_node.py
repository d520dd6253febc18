"""A node in this process that says what a test tells it to, and remembers what was asked.

The tokenizer is one byte a token. Everything else about it obeys `NodeFace`: accepted
requests are in the folded state until they end, in exactly one of the end states.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blitzd.fsm import ClusterState
from blitzd.fsm.standing import plan_json
from blitzd.fsm.state import COUNTED
from blitzd.node.face import (
    Delta,
    GenerateRequest,
    GenerationFailed,
    Health,
    HistogramData,
    ModelCard,
    Observations,
    OperatorCommand,
    TokenLogprobs,
)

MODEL = "org/scripted-1b"
CONTEXT = 512
VOCAB = 300


@dataclass(frozen=True)
class Pause:
    seconds: float


FOREVER = Pause(3600.0)

WELL = Health(live=True, ready=True, draining=False)

Script = Sequence[Delta | Pause | Exception]


def say(*texts: str, finish: str | None = "stop") -> list[Delta]:
    """One token a text; the last delta carries `finish`."""
    last = len(texts) - 1
    return [
        Delta(text, (ord(text[0]) % VOCAB if text else 0,), finish if i == last else None)
        for i, text in enumerate(texts)
    ]


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """The token itself is the best, its successors follow."""
    ranked = [((token + i) % VOCAB, -0.25 - i) for i in range(top)]
    return TokenLogprobs(-0.25, ranked)


def scored(request: GenerateRequest, script: Script) -> Script:
    """With the logprobs that were asked for, where the script has none of its own."""
    found: list[Delta | Pause | Exception] = []
    if request.prompt_logprobs is not None:
        for token in request.prompt_tokens[1:]:
            scores = (logprobs_of(token, request.prompt_logprobs),)
            found.append(Delta("", (), prompt_logprobs=scores))
    for step in script:
        if isinstance(step, Delta) and not step.logprobs:
            scores = tuple(logprobs_of(token, request.logprobs or 0) for token in step.token_ids)
            step = replace(step, logprobs=scores)
        found.append(step)
    return found


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def spell(self, token_id: int) -> tuple[str, bytes]:
        if token_id >= 256:
            return f"<|{token_id}|>", b""
        own = bytes([token_id])
        return own.decode(errors="replace"), own

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("messages[0]: a conversation starts with system or user")
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


@dataclass
class ScriptedNode:
    script: Script | Callable[[GenerateRequest], Script] = field(
        default_factory=lambda: say("Par", "is", ".")
    )
    refuse: Callable[[GenerateRequest], Exception | None] = lambda request: None
    accept_s: float = 0.0
    """How long an acceptance takes."""
    state_now: Health = WELL
    records: list[dict[str, Any]] = field(default_factory=list)
    events_fail: Exception | None = None
    asked: list[GenerateRequest] = field(default_factory=list)
    open: dict[int, str] = field(default_factory=dict)
    ends: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("finished", "failed", "cancelled", "rejected"), 0)
    )
    commands: list[OperatorCommand] = field(default_factory=list)
    decides: Callable[[OperatorCommand], list[dict[str, Any]]] = lambda command: []
    """The events that a command leads to, or CommandFailed."""
    followers: int = 0
    made: int = 0

    def __post_init__(self) -> None:
        self.seen = Observations(*(HistogramData((0.01, 0.1, 1.0), [0] * 4) for _ in range(4)))
        self.new_record = asyncio.Event()

    @property
    def models(self) -> list[ModelCard]:
        return [ModelCard(MODEL, 1_700_000_000, CONTEXT, VOCAB, "0123456789abcdef", "apache-2.0")]

    def tokenizer(self, model: str) -> ByteTokenizer:
        assert model == MODEL
        return ByteTokenizer()

    async def generate(self, request: GenerateRequest) -> "ScriptedGeneration":
        self.asked.append(request)
        if refusal := self.refuse(request):
            self.ends["rejected"] += 1
            raise refusal
        await asyncio.sleep(self.accept_s)
        self.made += 1
        self.open[self.made] = "queued"
        script = self.script(request) if callable(self.script) else self.script
        if request.logprobs is not None:
            script = scored(request, script)
        return ScriptedGeneration(self, self.made, script)

    def health(self) -> Health:
        return self.state_now

    def state(self) -> dict[str, Any]:
        by_state = dict.fromkeys(("queued", "prefilling", "migrating", "decoding"), 0)
        for state in self.open.values():
            by_state[state] += 1
        return {
            "seq": 7,
            "now_ns": 1000,
            "hash": "ab" * 32,
            "replicas": [_replica("p0", "Prefill", len(self.open)), _replica("d0", "Decode", 0)],
            "queue": {"requests": by_state["queued"], "tokens": 5 * by_state["queued"]},
            "requests": by_state | self.ends,
            "resumes": {"worker_lost": 3, "handover_failed": 0},
            "links": [],
            "faulty_links": [],
            "agents": [],
            "topology": [],
            "pairs": [{"id": 1, "new": "p0", "old": "d0"}],
            "node": dict.fromkeys(COUNTED, 0),
            "plan": plan_json(ClusterState()),
        }

    async def command(self, command: OperatorCommand) -> list[dict[str, Any]]:
        self.commands.append(command)
        return self.decides(command)

    def policy(self) -> dict[str, dict[str, int]]:
        return {
            "drain_ms": {"value": 600_000, "min": 1, "max": 86_400_000},
            "mutate_after_load": {"value": 0, "min": 0, "max": 1},
        }

    async def events(
        self, since: int, limit: int, follow: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        self.followers += 1
        try:
            for _ in range(limit):
                while since >= len(self.records):
                    if self.events_fail:
                        raise self.events_fail
                    if not follow:
                        return
                    self.new_record.clear()
                    await self.new_record.wait()
                yield self.records[since]
                since += 1
        finally:
            self.followers -= 1

    def observations(self) -> Observations:
        return self.seen

    def end(self, request_id: int, how: str) -> None:
        if self.open.pop(request_id, None):
            self.ends[how] += 1


class ScriptedGeneration:
    def __init__(self, node: ScriptedNode, request_id: int, script: Script) -> None:
        self.request_id = request_id
        self._node = node
        self._script = script

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for step in self._script:
            match step:
                case Pause():
                    await asyncio.sleep(step.seconds)
                case Delta():
                    if step.finish:
                        self._node.end(self.request_id, "finished")
                    else:
                        self._node.open[self.request_id] = "decoding"
                    yield step
                case GenerationFailed():
                    self._node.end(self.request_id, "failed")
                    raise step
                case _:
                    raise step
        self._node.end(self.request_id, "failed")

    async def cancel(self) -> None:
        await asyncio.sleep(0)
        self._node.end(self.request_id, "cancelled")


def _replica(name: str, state: str, inflight: int) -> dict[str, Any]:
    return {
        "id": name,
        "epoch": 3,
        "state": state,
        "role": state.lower(),
        "node": "here",
        "layers_ready": 30,
        "layers_total": 30,
        "bytes_loaded": 1000,
        "bytes_total": 1000,
        "source": "map",
        "inflight": inflight,
        "blocks_used": 2,
        "blocks_total": 64,
        "since_seq": 1,
        "cause_seq": 1,
        "flow": {
            f"{carries}_{direction}": {"bytes": 0, "open": 0}
            for carries in ("kv", "weights")
            for direction in ("in", "out")
        },
    }
