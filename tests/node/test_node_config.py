"""What follows from what a node is told."""

from pathlib import Path

from blitzd.events.types import NodeLinks
from blitzd.node.config import NodeConfig
from blitzd.node.starter import Starter


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


def test_a_replicas_worker_has_the_network_device_of_the_link_that_is_planned_with() -> None:
    node = config(network_devices=("eth0", "eth1", "eth2"))
    links = NodeLinks("n2", node.network_devices, 1)
    for replica in ("r0", "r1", "n2.r5"):
        assert f"n2/{node.network_device_of(replica)}" == links.link_of(replica)
    argv = Starter(node, Path("run")).options("r4", 1)
    assert argv[argv.index("--network-device") + 1] == "eth1"
    assert "--network-device" not in Starter(config(), Path("run")).options("r4", 1)
