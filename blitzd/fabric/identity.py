"""Who a peer is: a replica and its epoch, written `r0/3`."""

import re
from typing import NamedTuple

_PATTERN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/(\d{1,19})")


class Identity(NamedTuple):
    replica: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.replica}/{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Raises ValueError unless `text` is `replica/epoch`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"identity: {text!r} is not REPLICA/EPOCH, such as 'r0/3' (letters, digits, "
                "'.', '_' and '-', at most 64; then a decimal epoch)"
            )
        return cls(match[1], int(match[2]))
