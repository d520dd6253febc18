"""What the simulator refuses, and how it says so."""

from pathlib import Path


class InputError(ValueError):
    """A file or an option that cannot be used. The message names it and what would be."""


class TraceError(InputError):
    """One bad entry of a request file."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        super().__init__(f"{path}:{line}: {field}: {problem}")
        self.line = line
        self.field = field
