"""A cluster of nodes on hosts of their own: KV and weights between them, links that fail and
machines that die, in the middle of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import wait_for
from tests.e2e.nodes import text_of_one_node
from tests.hosts.cluster import BODY, HostsCluster, Streams, running
from tests.hosts.netns import Hosts, hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

RATE_MBIT = 400.0
NOTICED_S = 1.0
TURN_S = 1.5
"""For changing a link (some processes), and daemons that get their turn on a busy box."""
AGENT_S = 2.5
"""For its stream to break, and its agent not to answer."""
QUICK = ("--set", "policy.lease_stall_ms=500")
FROM_PEERS = ("--set", "policy.ladder_map=0", "--set", "policy.null_ttl_ms=1")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one node that does all by itself."""
    return text_of_one_node(tmp_path_factory.mktemp("alone"), BODY)


@pytest.fixture
def made() -> Iterator[Hosts]:
    with hosts(4, RATE_MBIT) as joined:
        yield joined


# KV.


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_kv_goes_between_hosts_and_around_a_link_that_fails(
    made: Hosts, tmp_path: Path, expected: str, fault: str
) -> None:
    """Prefill on a, decode on b and c. Then nothing comes through to b."""
    with running(made, tmp_path, ("decode", "decode"), *QUICK) as cluster:
        cluster.start("a", "b", "c")
        for replica in ("b.r0", "c.r0"):
            cluster.wait_state(replica, "Decode")
        assert Streams(cluster, 4).join() == [expected] * 4
        moved = cluster.since(0, "MigrationStarted")
        assert {e["payload"]["target"] for e in moved} == {"b.r0", "c.r0"}

        before = Streams(cluster, 4)
        wait_for("both decode", lambda: cluster.a.state()["requests"]["decoding"] == 4)
        seq, failed = cluster.a.state()["seq"], time.monotonic()
        if fault == "cut":
            made.cut(cluster.host("b"))
        else:
            made.stall(cluster.host("b"))
        during = Streams(cluster, 6, every_s=0.3)
        wait_for("a transfer that failed", lambda: bool(cluster.since(seq, "MigrationFailed")))
        noticed = time.monotonic() - failed
        assert during.join() == [expected] * 6
        # Those that were decoding on b go on elsewhere once its lease is over.
        assert before.join() == [expected] * 4
        print(f"{fault}: a transfer failed after {noticed:.2f} s")
        assert noticed < NOTICED_S + TURN_S
        wait_for("b is lost", lambda: cluster.phase("b") == "lost", 30.0)

        cluster.back("b")
        cluster.wait_state("b.r0", "Decode")
        seq = cluster.a.state()["seq"]
        assert Streams(cluster, 4).join() == [expected] * 4
        targets = {e["payload"]["target"] for e in cluster.since(seq, "MigrationStarted")}
        assert targets == {"b.r0", "c.r0"}
        assert len(cluster.agents["b"].workers()) == 1, "one of before still runs"
        cluster.a.idle()


def test_what_decoded_on_a_machine_that_was_killed_does_not_wait_for_its_lease(
    made: Hosts, tmp_path: Path, expected: str
) -> None:
    with running(made, tmp_path, ("decode", "decode"), "--set", "node.lease_s=60") as cluster:
        cluster.start("a", "b", "c")
        for replica in ("b.r0", "c.r0"):
            cluster.wait_state(replica, "Decode")
        streams = Streams(cluster, 4)
        wait_for("both decode", lambda: cluster.a.state()["requests"]["decoding"] == 4)
        seq, killed = cluster.a.state()["seq"], time.monotonic()
        cluster.die("b", "killed")
        resumed = lambda: bool(cluster.since(seq, "RequestResumed"))  # noqa: E731
        wait_for("a request that goes on elsewhere", resumed)
        took = time.monotonic() - killed
        print(f"resumed after {took:.2f} s, with a lease of 60 s")
        assert took < AGENT_S + TURN_S
        assert streams.join() == [expected] * 4
        assert cluster.phase("b") == "present"
        # It comes back within its lease, to a replica that waits for it.
        cluster.back("b")
        cluster.wait_state("b.r0", "Decode")
        assert cluster.since(seq, "NodeLost") == []
        assert Streams(cluster, 4).join() == [expected] * 4


def test_a_link_that_is_back_within_the_lease_costs_nothing_but_the_wait(
    made: Hosts, tmp_path: Path, expected: str
) -> None:
    with running(made, tmp_path, ("decode",), *QUICK) as cluster:
        cluster.start("a", "b")
        cluster.wait_state("b.r0", "Decode")
        pid = cluster.replica("b.r0")["pid"]
        streams = Streams(cluster, 2)
        wait_for("it decodes", lambda: cluster.a.state()["requests"]["decoding"] == 2)
        seq = cluster.a.state()["seq"]
        made.cut(cluster.host("b"))
        time.sleep(1.5)
        cluster.back("b")
        assert streams.join() == [expected] * 2
        assert cluster.replica("b.r0")["pid"] == pid
        assert cluster.since(seq, "NodeLost", "WorkerLost", "RequestResumed") == []


# Weights.


@pytest.fixture
def chain(made: Hosts, tmp_path: Path) -> Iterator[HostsCluster]:
    """b decodes and is to give its weights to c and d, one after the other."""
    with running(made, tmp_path, ("decode", "spare", "spare"), *FROM_PEERS) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.wait_state("b.r0", "Decode")
        for spare in ("c.r0", "d.r0"):
            wait_for(spare, lambda s=spare: cluster.replica(s).get("worker") == "attached", 60.0)
        yield cluster


def loading(cluster: HostsCluster) -> dict[str, str]:
    """The source of each that loads in the chain, once bytes have come to both."""
    cluster.scale(1, 3)

    def moving() -> bool:
        return all(cluster.replica(r).get("bytes_loaded", 0) > 0 for r in ("c.r0", "d.r0"))

    wait_for("bytes on their way", moving, 30.0)
    return {r: cluster.replica(r)["source"] for r in ("c.r0", "d.r0")}


def test_weights_go_through_the_hosts_in_a_chain(chain: HostsCluster, expected: str) -> None:
    sources = loading(chain)
    first = next(r for r, source in sources.items() if source == "b.r0")
    [second] = set(sources) - {first}
    assert sources[second] == first
    for replica in sources:
        chain.wait_state(replica, "Decode")
    assert Streams(chain, 6).join() == [expected] * 6


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("source", "killed"),
        ("source", "dark"),
        ("middle", "killed"),
        ("middle", "dark"),
        ("target", "killed"),
    ],
)
def test_a_machine_of_a_chain_dies_in_the_middle_of_the_transfer(
    chain: HostsCluster, expected: str, victim: str, how: str
) -> None:
    sources = loading(chain)
    middle = next(r for r, source in sources.items() if source == "b.r0")
    [target] = set(sources) - {middle}
    dead = {"source": "b.r0", "middle": middle, "target": target}[victim].split(".")[0]
    chain.die(dead, how)
    alive = [r for r in ("b.r0", "c.r0", "d.r0") if not r.startswith(dead)]
    for replica in alive:
        chain.wait_state(replica, "Decode")
    assert Streams(chain, 4).join() == [expected] * 4
    wait_for("it is lost", lambda: chain.phase(dead) == "lost", 30.0)
    chain.back(dead)
    for replica in ("b.r0", "c.r0", "d.r0"):
        chain.wait_state(replica, "Decode")
    assert Streams(chain, 6).join() == [expected] * 6
    digests = {r["model_digest"] for r in chain.a.state()["replicas"]}
    assert len(digests) == 1
    chain.a.idle()


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_link_of_a_chain_fails_and_the_rest_goes_around_it(
    chain: HostsCluster, expected: str, fault: str
) -> None:
    sources = loading(chain)
    middle = next(r for r, source in sources.items() if source == "b.r0")
    [target] = set(sources) - {middle}
    node = middle.split(".")[0]
    seq, failed = chain.a.state()["seq"], time.monotonic()
    if fault == "cut":
        chain.hosts.cut(chain.host(node))
    else:
        chain.hosts.stall(chain.host(node))
    chain.wait_event(
        seq,
        "LoadProgressed",
        lambda e: (e["replica"], e["source"]) == (target, "b.r0"),
    )
    took = time.monotonic() - failed
    print(f"{fault}: {target} goes on from b.r0 after {took:.2f} s")
    assert took < NOTICED_S + TURN_S
    chain.wait_state(target, "Decode")
    assert Streams(chain, 4).join() == [expected] * 4
    chain.back(node)
    chain.wait_state(middle, "Decode")
    assert Streams(chain, 6).join() == [expected] * 6
