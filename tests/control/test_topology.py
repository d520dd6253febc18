"""What the configuration says of the network is in the log, in the state, and in plans."""

from collections.abc import Iterable

from blitzd.cli.status import lines_of
from blitzd.control.redecide import redecide
from blitzd.control.topology import Device, topology_of
from blitzd.events import types as ev
from blitzd.fsm import ClusterState, Replica
from tests.control.harness import Harness, only, refold

GB = 10**9
A = ev.NodeLinks("a", ("e0", "e1"), 12 * GB, "l1", "pod", 400 * GB)
B = ev.NodeLinks("b", ("e0",), 3 * GB, "l2", "pod", 400 * GB)


def world(*topology: ev.NodeLinks) -> Harness:
    """A controller with r0 to r2; a, b and c offer two replicas each."""
    made = Harness()
    made.topology = topology
    made.boot("prefill", "decode", "spare")
    for node in "abc":
        offered = tuple((f"{node}.r{i}", "spare") for i in range(2))
        made.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    return made


def cluster(*topology: ev.NodeLinks) -> tuple[ClusterState, Iterable[Replica]]:
    state = world(*topology).state
    return state, state.replicas.values()


def test_a_described_node_has_its_links_shared_by_its_replicas_in_turns() -> None:
    found = topology_of(*cluster(A, B))
    assert [found.devices[name] for name in ("a.r0", "a.r1", "b.r0", "b.r1")] == [
        Device("pod", "l1", 12 * GB, "a/e0"),
        Device("pod", "l1", 12 * GB, "a/e1"),
        Device("pod", "l2", 3 * GB, "b/e0"),
        Device("pod", "l2", 3 * GB, "b/e0"),
    ]
    assert found.rate("a.r0", "b.r0") == 400 * GB


def test_a_node_that_is_left_out_is_alone_and_as_slow_as_the_slowest() -> None:
    found = topology_of(*cluster(A, B))
    assert found.devices["c.r0"] == Device("c", "", 3 * GB)
    assert found.rate("c.r0", "a.r0") == 3 * GB
    # Inside a node nothing goes over a link, however fast those are.
    assert found.rate("c.r0", "c.r1") > 12 * GB


def test_without_a_description_all_links_are_alike() -> None:
    found = topology_of(*cluster())
    assert {d._replace(domain="") for d in found.devices.values()} == {Device("", "", 1)}
    assert found.devices["r0"].domain == "local"
    assert found.rate("a.r0", "a.r1") > found.rate("a.r0", "b.r0")


def test_a_replica_keeps_its_link_over_its_lives_and_whatever_its_node_is_called() -> None:
    links = ev.NodeLinks("gpu12", ("e0", "e1", "e2"), GB)
    assert [links.link_of(f"gpu12.r{i}") for i in (0, 1, 2, 3)] == [
        "gpu12/e0",
        "gpu12/e1",
        "gpu12/e2",
        "gpu12/e0",
    ]


def test_a_boot_records_a_topology_that_is_another_than_the_last_one() -> None:
    made = Harness()
    roles = ("prefill", "decode")
    assert not [e for e in made.boot(*roles) if isinstance(e, ev.TopologyDescribed)]
    made.topology = (A, B)
    assert only(made.boot(*roles), ev.TopologyDescribed).nodes == (A, B)
    assert not [e for e in made.boot(*roles) if isinstance(e, ev.TopologyDescribed)]
    hashed = made.state.hash()
    made.topology = (A,)
    assert only(made.boot(*roles), ev.TopologyDescribed).nodes == (A,)
    assert made.state.topology == {"a": A}
    assert made.state.hash() != hashed
    made.topology = ()
    assert only(made.boot(*roles), ev.TopologyDescribed).nodes == ()
    assert redecide(made.log).difference is None
    assert refold(made.log).hash() == made.state.hash()


def test_a_snapshot_keeps_it_and_the_status_shows_it() -> None:
    state = world(A, ev.NodeLinks("b", ("net",), GB)).state
    again = ClusterState.decode(state.encode())
    assert again.topology == state.topology
    assert again.hash() == state.hash()
    lines = lines_of(state.to_json() | {"now_ns": 0})
    assert "links  a  e0, e1: 96 Gbit/s each, leaf l1, domain pod of 3200 Gbit/s" in lines
    assert "links  b  net: 8 Gbit/s each" in lines
