"""What a node is told to run."""

from dataclasses import dataclass, field
from pathlib import Path

from blitzd.control.policy import Policy
from blitzd.events.topology_events import NodeLinks, number_of
from blitzd.fabric import PLAIN, Tls


@dataclass(frozen=True, slots=True)
class NodeConfig:
    state_dir: Path
    model_dir: Path
    """A prepared model."""
    model_name: str
    temperature: float = 1.0
    """Of requests that name none."""
    prefill: int = 1
    decode: int = 1
    spare: int = 1
    node: str = "local"
    address: str = ""
    """By which other nodes reach this one; empty: there are none."""
    node_port: int = 0
    """Of the controller, for agents."""
    controller: str = ""
    """HOST:PORT; empty: this is the controller."""
    tls: Tls = PLAIN
    """Between nodes."""
    lease_s: float = 10.0
    """An agent that is not heard of for so long is lost."""
    spawn: str = "process"
    """How workers are started: process or systemd."""
    same_node: str = "map"
    """How KV moves between workers of this node: map or ucx."""
    network_devices: tuple[str, ...] = ()
    """Replicas take turns on them, by their number; empty: each uses all."""
    kv_blocks: int = 256
    """KV blocks of 64 tokens per replica."""
    devices: tuple[str, ...] = ("cpu",)
    """Replicas take turns on them, by their number; names as `blitzd worker --device` has them."""
    weights: str = "map"
    """Of each replica: map (shared on the node) or copy."""
    worker_threads: int = 1
    max_batch_tokens: int = 512
    max_batch_size: int = 64
    pace_layer_ms: float = 0.0
    live_policy: str = "ilp_free"
    """As `blitzd worker --live-policy` has it."""
    orphan_timeout_s: float = 20.0
    start_deadline_s: float = 30.0
    """From the start of a worker to its first answer."""
    hang_deadline_s: float = 5.0
    """A worker that shows no sign of life for so long is ended: it may be stopped or stuck."""
    step_deadline_s: float = 60.0
    """The same for one that answers and computes one step for so long."""
    drain_s: float = 30.0
    topology: tuple[NodeLinks, ...] = ()
    """In order of the nodes' names."""
    policy: Policy = field(default_factory=Policy)

    def replicas(self) -> tuple[tuple[str, str], ...]:
        """(id, role), ids r0, r1, ... in the order prefill, decode, spare."""
        roles = ["prefill"] * self.prefill + ["decode"] * self.decode + ["spare"] * self.spare
        return tuple((f"r{index}", role) for index, role in enumerate(roles))

    def device_of(self, replica: str) -> str:
        """The same for every epoch of a replica."""
        return self.devices[number_of(replica) % len(self.devices)]

    def network_device_of(self, replica: str) -> str:
        """The same for every epoch of a replica. Empty: any."""
        devices = self.network_devices
        return devices[number_of(replica) % len(devices)] if devices else ""
