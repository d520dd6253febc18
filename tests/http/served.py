"""Serves a scripted node on real sockets, in a thread with an event loop of its own."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from blitzd.http import Limits, Serving, serve
from tests.http.scripted_node import MODEL, ScriptedNode

START_S = 10.0
ANSWER_S = 10.0
"""Longest that a test waits for an answer."""


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for its shape."""
        body = self.json
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"]
        return body["error"]


@dataclass
class Served:
    node: ScriptedNode
    where: Serving
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.where.port}/v1"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        admin: bool = False,
    ) -> Answer:
        """One request. A body that is not bytes is sent as JSON."""
        port = self.where.admin_port if admin else self.where.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        headers = dict(headers or {})
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
            if not isinstance(body, bytes):
                body = json.dumps(body).encode()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Answer:
        return self.ask("POST", "/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> Answer:
        body = {"model": MODEL, "prompt": "Hi"} | fields
        return self.ask("POST", "/v1/completions", body)

    def raw(self, data: bytes, admin: bool = False) -> socket.socket:
        """A connection on which `data` has been sent."""
        port = self.where.admin_port if admin else self.where.port
        sock = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        sock.sendall(data)
        return sock

    def call(self, work: Callable[[], Any]) -> None:
        """Runs `work` in the server's loop."""
        self.loop.call_soon_threadsafe(work)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


def post(path: str, body: Any) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def frames(body: bytes) -> list[Any]:
    """The JSON objects of a stream, its frames checked; "[DONE]" stays a string."""
    assert body.endswith(b"\n\n")
    found = []
    for event in body[:-2].split(b"\n\n"):
        assert event.startswith(b"data: "), event
        assert b"\n" not in event and b"\r" not in event
        text = event.removeprefix(b"data: ").decode()
        found.append(text if text == "[DONE]" else json.loads(text))
    return found


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.005)


@contextmanager
def served(node: ScriptedNode, limits: Limits | None = None, **options: Any) -> Iterator[Served]:
    started: threading.Event = threading.Event()
    found: list[Served] = []
    failures: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        options.setdefault("host", "127.0.0.1")
        async with serve(
            node, port=0, admin_port=0, limits=limits or Limits(shutdown_s=2.0), **options
        ) as where:
            found.append(Served(node, where, loop))
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as failure:
            failures.append(failure)
        finally:
            started.set()

    stops: list[Callable[[], Any]] = []
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(START_S)
    try:
        if found:
            yield found[0]
    finally:
        for stop in stops:
            stop()
        thread.join(START_S + 10.0)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
