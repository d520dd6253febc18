"""The one writer of a log.

`append` hands whole batches to the operating system: after it returns they survive the
death of this process. `sync` puts them on disk: `durable_seq` survives a power cut.
An append is all or nothing, also across a crash.

After an error the writer says so and accepts nothing: "full" when the disk was (see
`try_resume`), "broken" for everything else. A failed fdatasync is never repeated, since
the kernel may have dropped the pages and would report success.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from blitzd.events.codec import encode_batch
from blitzd.events.disk import Disk, OsDisk, write_all
from blitzd.events.errors import LogLocked, LogUnavailable, RecordRefused
from blitzd.events.record import Record
from blitzd.events.recovery import Plan, carry_out, inspect
from blitzd.events.segment import SegmentHeader, encode_header, segment_path

SEGMENT_BYTES = 64 << 20
SEGMENT_NS = 3600 * 10**9
UNSYNCED_BYTES_MAX = 64 << 20
PROBE_BYTES = 64 << 10
"""What must fit on a disk that was full before the log goes on."""

State = Literal["open", "full", "broken", "closed"]
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LogStatus(msgspec.Struct, frozen=True):
    """For /status and the metrics page."""

    state: State
    reason: str
    last_seq: int
    durable_seq: int
    segment_first_seq: int
    """0: there is no segment yet, the disk was full at the start."""
    segment_bytes: int
    unsynced_bytes: int
    boot_epoch: int
    recovered: tuple[str, ...]
    """Files that hold what the opening cut off."""


class Identity(msgspec.Struct, frozen=True):
    """Who writes, for the segment headers."""

    daemon_version: str = ""
    config_digest: str = ""
    node_id: str = ""


class LogWriter:
    """Use `LogWriter.open`. `append` and `sync` may run in different threads: a sync never
    holds up an append, except while a segment is changed (once in `segment_bytes`) or when
    `UNSYNCED_BYTES_MAX` are waiting for one."""

    def __init__(
        self,
        directory: Path,
        lock_fd: int,
        disk: Disk,
        identity: Identity,
        plan: Plan,
        segment_bytes: int,
        segment_ns: int,
        stamp: int,
    ) -> None:
        self._directory = directory
        self._lock_fd = lock_fd
        self._disk = disk
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._segment_ns = segment_ns
        self._stamp = stamp
        self._plan: Plan | None = plan
        self._chain = plan.chain
        self._boot_epoch = plan.boot_epoch
        self._durable_seq = plan.last_seq
        self._state: State = "open"
        self._reason = ""
        self._fd = -1
        self._size = 0
        self._begin = 0
        self._synced_size = 0
        self._mono_ns = 0
        self._segment_mono_ns = -1
        self._header: SegmentHeader | None = None
        self._recovered: tuple[str, ...] = ()
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: Identity | None = None,
        *,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        segment_ns: int = SEGMENT_NS,
        accept_loss: int | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> "LogWriter":
        """Takes the log in `directory` (made if it is not there), repairs a torn tail, and
        begins a segment.

        With no room on the disk the writer opens in state "full". Raises LogLocked,
        LogCorrupt (unless `accept_loss` is its `first_lost`), and OSError.
        """
        disk = disk or OsDisk()
        try:
            disk.names(directory)
        except FileNotFoundError:
            disk.make_directory(directory)
            disk.fsync_directory(directory.parent)
        lock_fd = _take_lock(disk, directory)
        try:
            plan = inspect(disk, directory, accept_loss)
            writer = cls(
                directory,
                lock_fd,
                disk,
                identity or Identity(),
                plan,
                segment_bytes,
                segment_ns,
                wall_ns(),
            )
            writer._establish()
        except BaseException:
            disk.close(lock_fd)
            raise
        return writer

    @property
    def last_seq(self) -> int:
        """Of the last record accepted; 0: none."""
        return self._chain.next_seq - 1

    @property
    def durable_seq(self) -> int:
        return self._durable_seq

    @property
    def boot_epoch(self) -> int:
        return self._boot_epoch

    def status(self) -> LogStatus:
        return LogStatus(
            self._state,
            self._reason,
            self.last_seq,
            self._durable_seq,
            self._header.first_seq if self._header else 0,
            self._size,
            self._size - self._synced_size,
            self._boot_epoch,
            self._recovered,
        )

    def append(self, records: Sequence[Record]) -> None:
        """All of `records`, whose sequences continue the log, or none of them.

        Raises RecordRefused (the writer is as before) and LogUnavailable.
        """
        if not records:
            return
        if self._size - self._synced_size > UNSYNCED_BYTES_MAX:
            self.sync()
        with self._append_lock:
            self._require_open()
            data, chain = encode_batch(records, self._chain, self._durable_seq)
            mono_ns = _last_mono(records, self._mono_ns)
            try:
                write_all(self._disk, self._fd, data, self._size)
            except OSError as error:
                self._fail(error, "writing")
            self._size += len(data)
            self._chain = chain
            self._mono_ns = mono_ns
            if self._segment_mono_ns < 0:
                self._segment_mono_ns = records[0].mono_ns

    def sync(self) -> int:
        """Blocks until everything appended before the call is on disk; returns
        `durable_seq`. Raises LogUnavailable."""
        with self._sync_lock:
            with self._append_lock:
                self._require_usable()
                fd, seq, size = self._fd, self.last_seq, self._size
            if seq > self._durable_seq:
                self._fdatasync(fd)
                self._durable_seq, self._synced_size = seq, size
            if self._is_segment_due():
                with self._append_lock:
                    self._rotate()
            return self._durable_seq

    def try_resume(self) -> bool:
        """When the disk was full: whether there is room again.

        What a failed append left is cut off first (it was refused, and nothing acted on
        it); then the log goes on with the next sequence. Raises LogUnavailable when the
        writer is broken or closed.
        """
        with self._sync_lock, self._append_lock:
            self._require_usable()
            if self._state == "open":
                return True
            return self._establish() if self._plan is not None else self._probe()

    def close(self) -> None:
        """Syncs if it can and lets the lock go. Never raises for a log that is broken."""
        if self._state == "closed":
            return
        with suppress(LogUnavailable):
            self.sync()
        with self._sync_lock, self._append_lock:
            self._state, self._reason = "closed", "closed by its owner"
            if self._fd >= 0:
                self._disk.close(self._fd)
            self._disk.close(self._lock_fd)

    def _require_open(self) -> None:
        if self._state != "open":
            raise LogUnavailable(self._state, self._reason)

    def _require_usable(self) -> None:
        if self._state in ("broken", "closed"):
            raise LogUnavailable(self._state, self._reason)

    def _fail(self, error: OSError, doing: str) -> NoReturn:
        self._state = "full" if error.errno in _FULL else "broken"
        self._reason = f"{doing} {self._directory}: {error.strerror or error}"
        raise LogUnavailable(self._state, self._reason) from error

    def _break(self, error: OSError, doing: str) -> NoReturn:
        self._state = "broken"
        self._reason = f"{doing} {self._directory}: {error.strerror or error}"
        raise LogUnavailable(self._state, self._reason) from error

    def _fdatasync(self, fd: int) -> None:
        try:
            self._disk.fdatasync(fd)
        except OSError as error:
            self._break(error, "syncing")

    def _establish(self) -> bool:
        """Carries out the recovery and begins this boot's segment; False: no room."""
        plan = self._plan
        assert plan is not None
        try:
            kept = carry_out(self._disk, self._directory, plan, self._stamp)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._state, self._reason = "full", f"recovering {self._directory}: {error.strerror}"
            return False
        self._recovered = tuple(path.name for path in kept)
        previous = plan.last.first_seq if plan.last else 0
        if plan.last and plan.last.first_seq == plan.chain.next_seq:
            previous = plan.last.previous_first_seq  # it is empty, and is replaced
        try:
            self._begin_segment(previous, plan.chain.crc)
        except LogUnavailable as error:
            if error.state != "full":
                raise
            return False
        self._plan = None
        self._state, self._reason = "open", ""
        return True

    def _is_segment_due(self) -> bool:
        if self._state != "open" or self._size == self._begin:
            return False
        age = self._mono_ns - self._segment_mono_ns
        return self._size >= self._segment_bytes or age >= self._segment_ns

    def _rotate(self) -> None:
        if self.last_seq > self._durable_seq:
            self._fdatasync(self._fd)
            self._durable_seq, self._synced_size = self.last_seq, self._size
        assert self._header is not None
        self._begin_segment(self._header.first_seq, self._chain.crc)

    def _begin_segment(self, previous_first_seq: int, crc: int) -> None:
        """A complete header under the segment's name, then switch to it."""
        header = SegmentHeader(
            self._identity.daemon_version,
            self._identity.config_digest,
            self._identity.node_id,
            self._boot_epoch,
            self._chain.next_seq,
            previous_first_seq,
            crc,
        )
        path = segment_path(self._directory, header.first_seq)
        temporary = path.with_name(path.name + ".tmp")
        data = encode_header(header)
        fd = -1
        try:
            fd = self._disk.open(temporary, write=True)
            self._disk.truncate(fd, 0)
            write_all(self._disk, fd, data, 0)
            self._disk.fdatasync(fd)
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
            with suppress(OSError):
                self._disk.remove(temporary)
            self._fail(error, "beginning a segment in")
        try:
            self._disk.rename(temporary, path)
            self._disk.fsync_directory(self._directory)
        except OSError as error:
            # Whether the name is on disk is unknown: going on in the old segment could
            # leave a log with two ends.
            self._disk.close(fd)
            self._break(error, "naming a segment in")
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self._header = fd, header
        self._size = self._begin = self._synced_size = len(data)
        self._segment_mono_ns = -1

    def _probe(self) -> bool:
        """Cuts what a failed append left, and sees whether there is room.

        Cuts first: some file systems need room to write over what is there."""
        try:
            self._disk.truncate(self._fd, self._size)
            write_all(self._disk, self._fd, bytes(PROBE_BYTES), self._size)
            self._disk.fdatasync(self._fd)
            self._disk.truncate(self._fd, self._size)
        except OSError as error:
            if error.errno in _FULL:
                return False
            self._break(error, "resuming")
        self._durable_seq, self._synced_size = self.last_seq, self._size
        self._state, self._reason = "open", ""
        return True


def _last_mono(records: Sequence[Record], mono_ns: int) -> int:
    for record in records:
        if record.mono_ns < mono_ns:
            raise RecordRefused(
                f"record {record.seq}: mono_ns {record.mono_ns} is before {mono_ns}, the "
                "record before it; this clock never goes backwards within one boot"
            )
        mono_ns = record.mono_ns
    return mono_ns


def _unused_stamp(names: list[str], wall_ns: int) -> int:
    """The time, or what comes after it: clocks jump, and what was cut off is not to be lost
    under the name of another cut."""
    while any(name.endswith(f".torn-{wall_ns}") for name in names):
        wall_ns += 1
    return wall_ns


def _take_lock(disk: Disk, directory: Path) -> int:
    fd = disk.open(directory / "lock", write=True)
    try:
        if not disk.lock(fd):
            raise LogLocked(directory, disk.pread(fd, 64, 0).decode(errors="replace") or "unknown")
        with suppress(OSError):  # the name of the holder helps people; the lock is the lock
            disk.truncate(fd, 0)
            write_all(disk, fd, str(os.getpid()).encode(), 0)
    except BaseException:
        disk.close(fd)
        raise
    return fd
