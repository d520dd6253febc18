"""An HTTP server that answers as the Hugging Face hub does, for the part of it that downloads
models: revisions, listings in pages, files in git and files in large storage behind a redirect.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = 3
"""Entries of a listing; the real one has a thousand."""
CHUNK = 1 << 14


def commit_of(number: int) -> str:
    return hashlib.sha1(b"%d" % number).hexdigest()


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    commit: str = field(default_factory=lambda: commit_of(0))
    said_sha256: dict[str, str] = field(default_factory=dict)
    """Where it is not that of the bytes."""
    unlisted: dict[str, int] = field(default_factory=dict)
    """Sizes that a listing claims of files."""

    def stored_large(self, name: str) -> bool:
        return name.endswith(".safetensors")

    def sha256(self, name: str) -> str:
        return self.said_sha256.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        size = self.unlisted.get(name, len(data))
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"type": "file", "oid": blob, "size": size, "path": name}
        if self.stored_large(name):
            found["lfs"] = {"oid": self.sha256(name), "size": size, "pointerSize": 134}
        return found


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        """(method, path, Range)."""
        self.cut_after: dict[str, list[int]] = {}
        """By file: after how many bytes the connection breaks, one entry for each time."""
        self.status = 0
        """Answered to everything instead, if not 0."""
        self.endless = False
        """Every page of a listing says that another comes."""
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, each as often as it was."""
        with self.lock:
            return [
                path.rpartition("/")[2]
                for method, path, _ in self.requests
                if method == "GET" and ("/resolve/" in path or path.startswith("/cdn/"))
            ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Tests look at `requests` instead."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = urlsplit(self.path).path
        with self.hub.lock:
            self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.status:
            return self._answer(self.hub.status, {}, b"{}")
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            return self._file(self.hub.repositories["/".join(parts[1:3])], parts[3])
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        if parts[:2] == ["api", "models"]:
            return self._api(name, repository, parts[4:])
        return self._resolve(name, repository, parts[3], "/".join(parts[4:]))

    def _api(self, name: str, repository: Repository, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", repository.commit):
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        if rest[:1] != ["tree"]:
            about = {"_id": "1", "id": name, "sha": repository.commit, "siblings": []}
            return self._answer(200, {}, json.dumps(about).encode())
        names = sorted(repository.files)
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE < len(names) or self.hub.endless:
            following = 0 if self.hub.endless else start + PAGE
            address = f"{self.hub.url}{urlsplit(self.path).path}?cursor={following}"
            headers["Link"] = f'<{address}>; rel="next"'
        page = [repository.entry(one) for one in names[start : start + PAGE]]
        page *= 1000 if self.hub.endless else 1
        return self._answer(200, headers, json.dumps(page).encode())

    def _resolve(self, name: str, repository: Repository, revision: str, file: str) -> None:
        headers = {"X-Repo-Commit": repository.commit}
        if file not in repository.files:
            return self._answer(404, headers | {"X-Error-Code": "EntryNotFound"}, b"")
        if repository.gated:
            return self._answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        if not repository.stored_large(file):
            headers["ETag"] = f'"{repository.entry(file)["oid"]}"'
            return self._file(repository, file, headers)
        headers["X-Linked-Etag"] = f'"{repository.sha256(file)}"'
        headers["X-Linked-Size"] = str(len(repository.files[file]))
        # Another host, as the storage is.
        headers["Location"] = f"{self.hub.url}/cdn/{name}/{file}".replace("127.0.0.1", "localhost")
        return self._answer(302, headers, b"")

    def _file(
        self, repository: Repository, file: str, headers: dict[str, str] | None = None
    ) -> None:
        data = repository.files[file]
        start, status, headers = 0, 200, dict(headers or {})
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        with self.hub.lock:
            cuts = self.hub.cut_after.get(file, [])
            cut = cuts.pop(0) if cuts and self.command == "GET" else None
        self._answer(status, headers, data[start:], cut)

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
