"""Records logs for the test corpus: `make logs`, or the script with [SCRIPT ...] [SEED ...].

Each becomes tests/data/logs/v<core version>-<name>/: the first turns of that chaos run (or
of a script, for what chaos does not do), put on disk by the log's own writer, and what they
fold to. Record new ones with each change of CORE_VERSION and keep the old: from then on they
are folded and no more decided again.
"""

import itertools
import shutil
import sys
from pathlib import Path

import cyclopts
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from blitzd.control.core import CORE_VERSION
from blitzd.events import Identity, LogWriter, types as ev
from blitzd.events.record import Kind, Record
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay
from tests.chaos.world import run_seed
from tests.control.harness import Harness
from tests.control.virtual_load import VirtualLoad
from tests.corpus import LOGS, Expected

RECORDS_MAX = 1100
"""Of a log. Enough for a state hash in it, small enough for a repository."""
USUAL = (
    *("pairs", "roles", "handovers", "restarts", "resumes", "plan", "presets", "nodes", "pool"),
    "shards",
    *("11", "40"),
)
"""Together they hold every type of record that the daemon writes."""

SEGMENT_BYTES = 24 << 10
HASH_EVERY = 25
"""Records between two hashes of `expected.json`."""


def record(*names: str) -> None:
    """Write one log for each seed or script, replacing those of the same name; without names,
    those that the corpus has of each version."""
    for name in names or USUAL:
        script = SCRIPTS.get(name)
        records = script() if script else run_seed(int(name)).disk.records
        directory = LOGS / f"v{CORE_VERSION}-{name if script else f'seed{name}'}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        expected = _write(directory / "log", records)
        encoded = msgspec.json.format(msgspec.json.encode(expected))
        (directory / "expected.json").write_bytes(encoded + b"\n")
        print(f"{directory.name}: {expected.last_seq} records, hash {expected.hash}")


def _write(directory: Path, records: list[Record]) -> Expected:
    state = ClusterState()
    hashes: dict[int, str] = {}
    writer = LogWriter.open(directory, Identity("corpus", "", "test"), segment_bytes=SEGMENT_BYTES)
    for turn in itertools.takewhile(lambda turn: turn[-1].seq <= RECORDS_MAX, _turns(records)):
        writer.append(turn)
        writer.sync()
        replay(state, turn)
        if state.seq // HASH_EVERY > max(hashes, default=0) // HASH_EVERY:
            hashes[state.seq] = state.hash()
    writer.close()
    (directory / "lock").unlink()
    return Expected(CORE_VERSION, state.seq, state.hash(), hashes)


def _turns(records: list[Record]) -> list[list[Record]]:
    turns: list[list[Record]] = []
    for one in records:
        if one.payload.kind is Kind.INPUT:
            turns.append([])
        turns[-1].append(one)
    return turns


def roles() -> list[Record]:
    """A prefill replica that becomes a decode one with what it has, one that is drained and
    gives up its weights, and a request that nobody has the room for."""
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.RoleRequested(world.state.requests[1].source, "decode"))
    world.first_token(1)
    world.ended(1)
    world.arrive(2, max_tokens=200)
    world.first_token(2)
    world.imported(2)
    on = world.state.requests[2].target
    world.feed(ev.DrainRequested(on, 0))
    world.feed(ev.DecodeHeld(on, 1, 2))
    world.imported(2)
    world.ended(2)
    world.feed(ev.DeactivateRequested(on))
    world.arrive(3, prompt=1_000_000)
    return world.log


def handovers() -> list[Record]:
    """A transfer that gets on slowly, one that stalls, one whose KV is not what was sent, the
    links they went over, and workers that keep what they should not."""
    policy = {"lease_stall_ms": 500, "link_cooldown_ms": 200, "audit_grace_ms": 1000}
    world = Harness(**policy).serving("prefill", "decode", "decode")
    world.after(ms=1)
    for request_id in (1, 2):
        world.arrive(request_id)
        world.first_token(request_id)
        world.sent[request_id] = 1
    world.after(ms=400)
    world.feed(ev.ImportProgressed(1, 1 << 20))
    world.after(ms=200)  # the other one has stalled
    world.imported(1)
    lease = world.state.requests[2].lease_id
    world.feed(ev.ImportEnded(lease, 1 << 20, 9, "corrupt", "layer 3 differs", 3, "00a1", "00a2"))
    world.after(ms=500)
    for request_id in (1, 2):
        world.feed(ev.ClientLeft(request_id))
    for request_id in (3, 4):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
        world.ended(request_id)
    clean = ((), (), 0, 0, ())
    world.feed(ev.HoldingsReported("r1", 1, 2, *clean))
    world.feed(ev.HoldingsReported("r1", 1, 0, *clean))
    for held in (((2, 0),), ()):
        world.feed(ev.HoldingsReported("r2", 1, 3, held, (), 0, 0, ("r0/1", "r7/1")))
        world.after(ms=1000)
        world.feed(ev.HoldingsReported("r2", 1, 3, held, (), 0, 0, ("r0/1", "r7/1")))
    world.feed(ev.StateAudited(("r1 has 65 of 64 blocks reserved",)))
    return world.log


def live_pairs() -> list[Record]:
    """A pair that shares requests and settles, one whose load fails, one whose old side dies, and
    a second boot with a smaller configuration."""
    world = Harness().serving("prefill", "decode", "spare", "spare", "spare")
    world.arrive(1)
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2")
    for request_id in (2, 3, 4, 5):
        world.arrive(request_id)
    world.relayed(2, 3)
    world.relayed(3, 0)
    refused = ev.RequestErrored("r2", 1, 4, "prompt_tokens: too many for a live prefill")
    world.feed(refused)
    world.followed(1, "source")
    world.after(100)
    world.load("r2")
    world.followed(1)
    for request_id in (1, 2, 3, 4, 5):
        world.first_token(request_id)
    for request_id in (2, 3, 4, 5):
        world.imported(request_id)
        world.ended(request_id)
    world.feed(ev.LivePairRequested("r3", "r0"))
    failed = ev.LoadEnded("r3", 1, "", "map", 30, 0, 64, 0, "digest differs")
    world.feed(failed)
    world.imported(1)
    world.feed(ev.LivePairRequested("r4", "r2"))
    world.arrive(6)
    world.feed(ev.WorkerExited("r2", 1, "killed"))
    world.load("r4")
    world.ended(1)
    world.after(1000)
    roles = (("r0", "prefill"), ("r1", "decode"))
    world.feed(ev.Booted(2, "test", "local", roles, world.policy.pairs(), CORE_VERSION))
    world.attach("r0")
    return world.log


def restarts() -> list[Record]:
    """A restart with a stand-in, one that is called off by a drain and an undrain, all in
    turn, one replica removed by name, and another policy."""
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.PolicyRequested((("drain_ms", 60_000), ("null_ttl_ms", 5000))))
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.feed(ev.RestartRequested("r1", 0))
    world.load("r2")
    world.feed(ev.DrainRequested("r1", 0))
    world.feed(ev.UndrainRequested("r1"))
    world.after(50)
    world.ended(1)
    world.feed(ev.RollingRestartRequested(1000))
    while world.state.node.rolling:
        world.after(50)
        for replica in list(world.state.replicas.values()):
            if replica.worker == "stopping":
                exited = ev.WorkerExited(replica.id, replica.epoch, "exited with status 0")
                world.feed(exited)
            elif replica.worker in ("spawning", "spawned"):
                world.attach(replica.id)
            elif replica.state.startswith("Loading"):
                world.load(replica.id)
    world.feed(ev.RoleRequested("r2", "decode"))
    world.load("r2")
    world.feed(ev.RemoveRequested("r1"))
    world.feed(ev.RestartRequested("r9", 0))
    world.feed(ev.RollingRestartRequested(1000))
    world.feed(ev.RollingRestartStopRequested())
    return world.log


def presets() -> list[Record]:
    """Under ServerlessLLM's policy: a load from the host's copy, one from the disk after its
    time; then loads over the network, by three other presets."""
    world = Harness().serving("prefill", "decode", "spare", "spare")
    world.feed(ev.PolicyRequested((("host_ttl_ms", 5000),), "impl_sllm,cache_replace"))
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.ended(1)
    world.feed(ev.ScaleRequested(1, 2))
    world.load("r2")
    for replica in ("r0", "r1", "r2"):
        world.feed(ev.WorkerExited(replica, 1, "killed"))
    world.after(5000)
    for replica in ("r0", "r1"):
        world.attach(replica)
        world.load(replica)
    for preset in ("impl_rdma", "impl_nvl", "impl_fast", "impl_tanz"):
        world.feed(ev.PolicyRequested((), preset))
        world.feed(ev.RoleRequested("r3", "decode"))
        world.load("r3")
        world.feed(ev.DrainRequested("r3", 0))
        world.feed(ev.DeactivateRequested("r3"))
    return world.log


def resumes() -> list[Record]:
    """A request that outlives a source, a target and a decode replica, another that is lost
    once too often, and tokens of an attempt that was over."""
    world = Harness(max_resumes=1).serving("prefill", "decode", "decode")
    world.after(1)
    world.arrive(1)
    world.first_token(1)
    world.sent[1] = 1
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    world.feed(ev.ImportEnded(2, 0, 0, "source", "peer was lost"))
    world.after(100)
    world.first_token(1)
    world.feed(ev.FirstTokenProduced("r2", 1, 1, held=0))
    world.sent[1] = 9
    world.feed(ev.DrainRequested("r2", world.now + 1))
    world.attach("r1")
    world.load("r1")
    world.after(1)
    world.feed(ev.TokensOutdated("r2", 1, 2))
    world.feed(ev.WorkerExited("r0", 1, "killed"))
    return world.log


def planned() -> list[Record]:
    """The planner goes up and down with a burst of which one leaves, is pinned by an operator
    and released."""
    world = Harness(autoscale=1, scale_down_window_ms=1000, arrival_window_ms=1000)
    world.serving("prefill", "decode", *["spare"] * 4)
    load = VirtualLoad(world)
    load.arrivals(1, 4, per_s=10, prompt=300)
    load.at(15 * 10**8, lambda: ev.ClientLeft(3))
    load.at(20 * 10**9, lambda: ev.ScaleRequested(2, 1))
    load.at(21 * 10**9, ev.ReleaseRequested)
    load.run(22)
    return world.log


def nodes() -> list[Record]:
    """A node that joins, decodes, freezes with a request on it, is back, and finds a restarted
    controller that adopts what it has."""
    world = Harness()
    world.topology = (
        ev.NodeLinks("b", ("eth0", "eth1"), 12_500_000_000, "l1", "pod", 400_000_000_000),
        ev.NodeLinks("local", ("eth0",), 3_125_000_000),
    )
    world.serving("prefill")
    for epoch in (1, 2):
        offered = (("b.r0", "decode"), ("b.r1", "spare"))
        world.feed(ev.AgentJoined("b", epoch, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
        world.attach("b.r0")
        world.attach("b.r1")
        world.load("b.r0")
        world.arrive(epoch)
        world.first_token(epoch)
        world.imported(epoch)
        if epoch == 1:
            world.feed(ev.AgentLost("b", epoch, "not heard of for 10 s"))
            world.after(1000)
            world.first_token(epoch)
    world.imported(1)
    own = (("r0", "prefill"),)
    adopted = (("r0", 1, world.replica("r0").pid),)
    world.feed(ev.Booted(2, "test", "local", own, world.policy.pairs(), CORE_VERSION, adopted))
    world.feed(ev.AgentJoined("b", 3, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    decode, spare = world.replica("b.r0"), world.replica("b.r1")
    world.feed(ev.WorkerFound("b.r0", decode.epoch, 9, "digest", 30, 1000, 64, 64))
    world.feed(ev.WorkerFound("b.r1", spare.epoch, 9, "", 0, 0, 0, 0))
    world.feed(ev.WorkerFound("b.r1", 1, 9, "", 0, 0, 0, 0))
    return world.log


def pooled() -> list[Record]:
    """Spares that keep the weights while no replica gives them: one cannot, one is lost with
    its node, one feeds the decode that comes back."""
    world = Harness(ladder_map=0, ladder_nvlink=0)
    world.boot("prefill", "decode", "spare")
    for node in "bc":
        offered = ((f"{node}.r0", "spare"),)
        world.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    for replica in list(world.state.replicas):
        world.attach(replica)
    world.load("r0")
    world.load("r1")
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    world.feed(ev.PoolCopyEnded("b.r0", 1, 0, "layer 2 has another digest"))
    world.feed(ev.PoolCopyEnded("c.r0", 1, 1000))
    world.feed(ev.AgentLost("c", 1, "not heard of for 10 s"))
    world.feed(ev.PoolCopyEnded("r2", 1, 1000))
    world.attach("r1")
    world.load("r1")
    world.after(1)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    return world.log


def sharded() -> list[Record]:
    """Two nodes of spares take the weights in over two links each; one that brings a shard dies,
    and one is cut off from everybody."""
    world = Harness(ladder_map=0, ladder_p2p=0)
    world.topology = tuple(
        ev.NodeLinks(node, links, 12_500_000_000, "l1")
        for node, links in (("b", ("e0", "e1")), ("c", ("e0", "e1")), ("local", ("e0", "e1", "e2")))
    )
    world.serving("decode", "decode", "prefill")
    for node in "bc":
        offered = tuple((f"{node}.r{i}", "spare") for i in range(3))
        world.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
        for replica, _ in offered:
            world.attach(replica)
    world.feed(ev.ScaleRequested(1, 8))
    world.feed(ev.LoadMoved("b.r0", 1, 4, 30, 400, 1000, "r0"))
    world.feed(ev.LoadMoved("c.r0", 1, 3, 30, 300, 1000, "b.r0"))
    world.feed(ev.WorkerExited("b.r1", 1, "killed"))
    world.feed(ev.LoadEnded("c.r1", 1, "", "b.r1", 30, 0, 64, 0, "unavailable"))
    for replica in ("b.r0", "c.r0", "b.r2", "c.r2"):
        world.load(replica)
    world.after(5000)
    world.attach("b.r1")
    world.load("b.r1")
    world.load("c.r1")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    return world.log


SCRIPTS = {
    "shards": sharded,
    "pool": pooled,
    "presets": presets,
    "pairs": live_pairs,
    "roles": roles,
    "handovers": handovers,
    "restarts": restarts,
    "resumes": resumes,
    "plan": planned,
    "nodes": nodes,
}


if __name__ == "__main__":
    cyclopts.run(record)
