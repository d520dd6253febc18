"""What an operator may say about one replica. No torch here."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Weights = Literal["map", "copy"]
LivePolicy = Literal["ilp_free", "ilp", "best_effort"]


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    device: Device = "cpu"
    """Where weights and KV lie, and with that the attention back end."""
    weights: Weights = "map"
    """Mapped and shared with every replica on the node, or a copy of one's own on huge pages."""
    threads: int = 1
    """Of torch, for the step loop."""
    max_batch_tokens: int = 512
    """Of one step: long prompts are computed in chunks of this, so it bounds how long the
    others wait for a step."""
    max_batch_size: int = 64
    pace_layer_ms: float = 0.0
    live_policy: LivePolicy = "ilp_free"
    """Which layer of which request runs next while the weights arrive."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch_size <= self.max_batch_tokens:
            raise ValueError(
                f"max_batch_size={self.max_batch_size}: must be between 1 and "
                f"max_batch_tokens={self.max_batch_tokens}"
            )
        if self.device != "cpu" and self.weights != "map":
            raise ValueError(
                f"weights: {self.weights}, but a device has a copy of its own anyway; "
                f"accepted with device {self.device}: map"
            )
