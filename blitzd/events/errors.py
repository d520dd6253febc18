"""What can be wrong with a log. Every message says where, what, and what would be lost."""

from pathlib import Path


class LogError(Exception):
    """Base of everything the log raises on purpose."""


class LogCorrupt(LogError):
    """Bytes that were once whole are not: nothing is read past them.

    `first_lost` is the first sequence that cannot be trusted, `last_good` the last that
    can (0: none). Opening with `accept_loss=first_lost` gives them up knowingly.
    """

    def __init__(
        self, file: Path, offset: int, reason: str, first_lost: int, last_good: int
    ) -> None:
        super().__init__(
            f"{file}: offset {offset}: {reason}. Records {first_lost} and later would be lost, "
            f"the last good one is {last_good}. Restore the file, or give them up knowingly: "
            f"blitzd log repair {file.parent} --accept-loss {first_lost}"
        )
        self.file = file
        self.offset = offset
        self.reason = reason
        self.first_lost = first_lost
        self.last_good = last_good


class LogLocked(LogError):
    """Another process writes this log."""

    def __init__(self, directory: Path, holder: str) -> None:
        super().__init__(
            f"{directory} is being written by process {holder}: stop it first, "
            "or give this daemon a state directory of its own"
        )
        self.directory = directory
        self.holder = holder


class LogUnavailable(LogError):
    """The writer accepts nothing now; `state` is "full", "broken" or "closed"."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(f"the log is {state}: {reason}")
        self.state = state
        self.reason = reason


class RecordRefused(LogError, ValueError):
    """A record that may not enter the log. Nothing of its batch was written."""


class UnknownRecord(LogError):
    """A record that must be understood has a type or version this daemon does not know."""

    def __init__(self, seq: int, type_id: int, schema_version: int, known: str) -> None:
        super().__init__(
            f"record {seq} has type id {type_id}, schema version {schema_version}, and must be "
            f"understood; this version knows {known}. Read it with the version that wrote it"
        )
        self.seq = seq
        self.type_id = type_id
        self.schema_version = schema_version
