"""Clients that stream without a pause, and know what each of their requests has to give."""

import threading
from typing import Any

from tests.e2e.daemon import Daemon

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "In the year 2000, people",
    "A list of fruit: apple,",
    "The weather today",
    "Water boils at",
    "My favourite book",
)


def body_of(client: int, tokens: int) -> dict[str, Any]:
    """Half of the clients sample, with seeds of their own; the others are greedy."""
    sampled = {"temperature": 0.8, "seed": 100 + client, "top_p": 0.95}
    sampling = sampled if client % 2 else {"temperature": 0}
    prompt = PROMPTS[client % len(PROMPTS)]
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **sampling}


class Streams:
    """`clients` of them at once. What each request has to give is what it gave before
    anything was done to the replicas, by the digest of its tokens in the log."""

    def __init__(self, daemon: Daemon, clients: int, tokens: int) -> None:
        self._daemon = daemon
        self._bodies = [body_of(client, tokens) for client in range(clients)]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.done: list[tuple[int, int, str]] = []
        """(client, request id in the log, text)."""
        self.failures: list[str] = []
        self._expected: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> "Streams":
        self._run(once=True)
        self._join()
        assert self.failures == []
        digests = self._digests()
        self._expected = {c: (digests[request], text) for c, request, text in self.done}
        self.done.clear()
        self._run(once=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._join()

    def _run(self, once: bool) -> None:
        self._threads = [
            threading.Thread(target=self._client, args=(client, once))
            for client in range(len(self._bodies))
        ]
        for thread in self._threads:
            thread.start()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a stream hangs"

    def _client(self, client: int, once: bool) -> None:
        while not self._stop.is_set():
            try:
                result = self._stream(client)
            except Exception as error:
                with self._lock:
                    self.failures.append(f"client {client}: {type(error).__name__}: {error}")
                return
            with self._lock:
                self.done.append(result)
            if once:
                return

    def _stream(self, client: int) -> tuple[int, int, str]:
        body = self._bodies[client] | {"stream_options": {"include_usage": True}}
        text, finish, usage, request_id = "", None, {}, 0
        for event in self._daemon.stream("/v1/completions", body):
            assert "error" not in event, event
            request_id = int(event["id"].removeprefix("cmpl-"))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        assert finish == "length", finish
        assert usage["completion_tokens"] == body["max_tokens"]
        return client, request_id, text

    def _digests(self) -> dict[int, str]:
        finished = [e["payload"] for e in self._daemon.events() if e["type"] == "RequestFinished"]
        return {payload["request_id"]: payload["output_digest"] for payload in finished}

    def check(self) -> None:
        """After the end: none failed, and each gave the same tokens and text as before."""
        assert self.failures == []
        digests = self._digests()
        wrong = [
            (client, request)
            for client, request, text in self.done
            if (digests[request], text) != self._expected[client]
        ]
        assert wrong == []
        ended = self._daemon.idle()["requests"]
        assert (ended["failed"], ended["cancelled"], ended["rejected"]) == (0, 0, 0)
        assert len(self.done) >= len(self._bodies)
