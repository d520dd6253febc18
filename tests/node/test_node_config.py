"""What follows from what a node is told."""

from pathlib import Path

from blitzd.node.config import NodeConfig


def config(**changes: object) -> NodeConfig:
    return NodeConfig(Path("state"), Path("model"), "tiny", **changes)  # type: ignore[arg-type]


def test_replicas_take_turns_on_the_devices() -> None:
    node = config(prefill=2, decode=3, devices=("cuda:0", "cuda:1"))
    placed = {replica: node.device_of(replica) for replica, _ in node.replicas()}
    assert placed == {
        "r0": "cuda:0", "r1": "cuda:1", "r2": "cuda:0",
        "r3": "cuda:1", "r4": "cuda:0", "r5": "cuda:1",
    }  # fmt: skip
    assert {config().device_of(f"r{number}") for number in range(3)} == {"cpu"}
