"""Speaking to a daemon's admin API: over its unix socket, or a URL."""

import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from blitzd.node.paths import default_state_dir, find_admin_socket

ANSWER_S = 15.0
"""More than the daemon takes to say that it did not decide in time."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Options that every verb has."""

    admin: Annotated[str, Parameter(help="URL of the daemon's admin API.")] = ""
    state_dir: Annotated[
        Path | None, Parameter(help="Of the daemon on this machine, as for `blitzd up`.")
    ] = None
    json: Annotated[bool, Parameter(negative="", help="Print JSON.")] = False


class NoDaemon(Exception):
    """Nobody answers there. The message says where, and what to do."""


class Refused(Exception):
    """The daemon's own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    def __init__(self, connect: Callable[[], http.client.HTTPConnection], name: str) -> None:
        self._connect = connect
        self._name = name

    @classmethod
    def at(cls, where: Where) -> "AdminClient":
        """Raises NoDaemon, ValueError for a URL that is none."""
        if where.admin:
            url = urllib.parse.urlsplit(where.admin)
            if url.scheme != "http" or not url.hostname or url.path.strip("/"):
                raise ValueError(f"--admin: {where.admin}; accepted: a URL as http://HOST:PORT")
            host, port = url.hostname, url.port or 80
            connect = lambda: http.client.HTTPConnection(host, port, timeout=ANSWER_S)  # noqa: E731
            return cls(connect, where.admin)
        state_dir = where.state_dir or default_state_dir()
        try:
            path = find_admin_socket(state_dir)
        except OSError:
            raise NoDaemon(
                f"no daemon has run with the state directory {state_dir}; start one with"
                " `blitzd up`, or say where it is with --state-dir or --admin"
            ) from None
        return cls(lambda: _UnixConnection(path), f"{path} (state directory {state_dir})")

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Raises NoDaemon, Refused."""
        connection = self._connect()
        try:
            return json.loads(self._request(connection, method, path, body).read())
        except TimeoutError:
            raise NoDaemon(
                f"the daemon at {self._name} does not answer within {ANSWER_S:.0f} s"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._nobody(error) from None
        finally:
            connection.close()

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
    ) -> http.client.HTTPResponse:
        encoded = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, encoded, headers)
        response = connection.getresponse()
        if response.status != 200:
            error = json.loads(response.read())["error"]
            raise Refused(response.status, error["message"])
        return response

    def _nobody(self, error: Exception) -> NoDaemon:
        return NoDaemon(
            f"no daemon answers at {self._name}: {error}; start one with `blitzd up`, or say"
            " where it is with --state-dir or --admin"
        )

    def follow(self, since: int, until: float) -> Iterator[dict[str, Any]]:
        """Records after `since` as they are appended, until the clock (`time.monotonic`) says
        `until`, or the daemon stops. Raises NoDaemon, Refused."""
        connection = self._connect()
        try:
            path = f"/admin/events?follow=true&since={since}"
            response = self._request(connection, "GET", path, None)
            while (left_s := until - time.monotonic()) > 0:
                assert connection.sock is not None
                connection.sock.settimeout(left_s)
                line = response.readline()
                if not line:
                    return
                yield json.loads(line)
        except TimeoutError:
            return
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._nobody(error) from None
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
