"""Hosts on one box: network namespaces joined by a switch, each over a link of limited rate.

What runs in one has real sockets to the others and nothing else; files and unix sockets are
shared, as if the control plane were another network. Needs root and `ip`, `tc`.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x20000
MS_REC, MS_SLAVE = 0x4000, 0x80000
BURST = "128k"
LATENCY = "50ms"
NOTHING = "root pfifo limit 0"
"""A queue without room. (netem is not in every kernel.)"""

T = TypeVar("T")


def why_not() -> str:
    """Why there can be no hosts on this box; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"blitzd-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"ip netns add: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def enter(namespace: str) -> None:
    """Moves the calling thread (of a process with one thread: the process) there."""
    with Path(f"/run/netns/{namespace}").open("rb") as handle:
        _setns(handle.fileno(), namespace)


def _setns(handle: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {name}")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """The calling thread, and what it starts meanwhile, is there."""
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        _setns(before, "back")
        os.close(before)


def move_to(namespace: str) -> None:
    """Moves this process, which has one thread, there: its sockets, and the devices that it
    sees in /sys, where UCX looks for them."""
    enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare: a mount namespace")
    for what, where, kind, flags in (
        (None, b"/", None, MS_REC | MS_SLAVE),
        (namespace.encode(), b"/sys", b"sysfs", 0),
    ):
        if libc.mount(what, where, kind, flags, None):
            raise OSError(ctypes.get_errno(), f"mount {where.decode()}")


class Hosts:
    """`count` hosts, named by number, with `links` network devices each, eth0, eth1 and so on.
    Those of one number are joined by a switch of their own. Made by `hosts`."""

    def __init__(self, count: int, rate_mbit: float, links: int = 1) -> None:
        self.count = count
        self.links = links
        self.rate_mbit = rate_mbit
        self._prefix = f"bz{os.getpid() % 100_000}"
        self.switch = f"{self._prefix}s"

    def name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def address(self, host: int, link: int = 0) -> str:
        return f"10.77.{link}.{host + 1}"

    def up(self) -> None:
        switch = self.switch
        _run(f"ip netns add {switch}")
        options = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        for link in range(self.links):
            _run(f"ip -n {switch} link add br{link} {options}")
            _run(f"ip -n {switch} link set br{link} up")
        for host in range(self.count):
            name = self.name(host)
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
            for link in range(self.links):
                self._join(host, link)

    def _join(self, host: int, link: int) -> None:
        switch, name, port, device = (
            self.switch,
            self.name(host),
            self._port(host, link),
            f"eth{link}",
        )
        _run(f"ip -n {switch} link add {port} type veth peer name {device} netns {name}")
        _run(f"ip -n {switch} link set {port} master br{link} up")
        _run(f"ip -n {name} addr add {self.address(host, link)}/24 dev {device}")
        _run(f"ip -n {name} link set {device} up")
        self.limit(host, self.rate_mbit, link)

    @staticmethod
    def _port(host: int, link: int) -> str:
        return f"p{host}-{link}"

    def limit(self, host: int, rate_mbit: float, link: int = 0) -> None:
        """Both ways of the host's link."""
        shape = f"root tbf rate {round(rate_mbit * 1e3)}kbit burst {BURST} latency {LATENCY}"
        _run(f"tc -n {self.name(host)} qdisc replace dev eth{link} {shape}")
        _run(f"tc -n {self.switch} qdisc replace dev {self._port(host, link)} {shape}")

    def cut(self, host: int, link: int = 0) -> None:
        """Takes the switch's port of the host down."""
        _run(f"ip -n {self.switch} link set {self._port(host, link)} down")

    def stall(self, host: int, link: int = 0) -> None:
        """The link is up and nothing comes through, either way."""
        _run(f"tc -n {self.name(host)} qdisc replace dev eth{link} {NOTHING}")
        _run(f"tc -n {self.switch} qdisc replace dev {self._port(host, link)} {NOTHING}")

    def mend(self, host: int, link: int = 0) -> None:
        """After a cut, or a stall."""
        _run(f"ip -n {self.switch} link set {self._port(host, link)} up")
        self.limit(host, self.rate_mbit, link)

    def down(self) -> None:
        for name in (self.switch, *map(self.name, range(self.count))):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def goodput(self, source: int, target: int, size: int = 32 << 20) -> float:
        """Bytes a second of one TCP connection between two hosts."""
        listening = _in_namespace(self.name(target), lambda: _listen(self.address(target)))
        with listening:
            port = listening.getsockname()[1]
            connect = (self.address(target), port)
            sending = _in_namespace(
                self.name(source), lambda: socket.create_connection(connect, timeout=5)
            )
            receiving, _ = listening.accept()
            with sending, receiving:
                sending.settimeout(60)
                thread = threading.Thread(target=sending.sendall, args=(bytes(size),))
                began = time.monotonic()
                thread.start()
                buffer, left = bytearray(1 << 20), size
                while left:
                    left -= receiving.recv_into(buffer, min(left, len(buffer)))
                took = time.monotonic() - began
                thread.join()
        return size / took


@contextlib.contextmanager
def hosts(count: int, rate_mbit: float, links: int = 1) -> Iterator[Hosts]:
    made = Hosts(count, rate_mbit, links)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _listen(address: str) -> socket.socket:
    listening = socket.create_server((address, 0))
    listening.settimeout(5)
    return listening


def _in_namespace(name: str, make: Callable[[], T]) -> T:
    """A socket belongs to the namespace that its thread was in when it was made."""
    made: list[T] = []

    def work() -> None:
        enter(name)
        made.append(make())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
