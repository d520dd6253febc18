"""KV and weights never share the direction of a link: whatever happens, weights are asked of
nobody whose KV leaves, and no KV goes to, or comes from, one that weights go through."""

from hypothesis import given, settings, strategies as st

from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm.flow import traffic, ways
from blitzd.fsm.table import LOADING
from tests.control.harness import Harness, RequestState

GB = 10**9
NODES = ("a", "b", "c")
EVENTS = ("arrive", "token", "import", "end", "moved", "loaded", "scale", "drain", "die", "time")


def world(described: bool, nvlink: bool) -> Harness:
    made = Harness(ladder_map=0, ladder_nvlink=int(nvlink), null_ttl_ms=1000)
    if described:
        made.topology = tuple(ev.NodeLinks(node, ("e0", "e1"), GB) for node in NODES)
    made.boot("prefill", "decode", "spare")
    for node in NODES:
        roles = ("decode" if node == "a" else "spare", "spare", "spare")
        offered = tuple((f"{node}.r{i}", role) for i, role in enumerate(roles))
        made.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    for replica in list(made.state.replicas):
        made.attach(replica)
    return made


class Story:
    """Checks every turn."""

    def __init__(self, made: Harness) -> None:
        self.made = made
        self.requests = 0

    def feed(self, payload: Payload) -> None:
        before = traffic(self.made.state)
        for event in self.made.feed(payload):
            if isinstance(event, ev.LoadStarted) and event.peers and event.rung != "nvlink":
                for way in ways(self.made.state, event.source, event.replica):
                    assert way.direction == "in" or not before[way, "kv"], (event, way)
        loading = {r.id for r in self.made.state.in_states(*LOADING)}
        for lease in self.made.state.leases.values():
            assert not loading & {lease.source, lease.target}, lease

    def step(self, what: str, number: int) -> None:
        made, state = self.made, self.made.state
        replica = list(state.replicas.values())[number % len(state.replicas)]
        requests = list(state.requests.values())
        request = requests[number % len(requests)] if requests else None
        if what == "arrive":
            self.requests += 1
            self.feed(ev.RequestArrived(self.requests, 100, 64, 7, 0))
        elif what == "scale":
            self.feed(ev.ScaleRequested(1 + number % 4, 1 + number // 4 % 6))
        elif what == "drain" and replica.role == "decode":
            self.feed(ev.RoleRequested(replica.id, "spare"))
        elif what == "die" and replica.worker == "attached":
            self.feed(ev.WorkerExited(replica.id, replica.epoch, "killed"))
        elif what == "time":
            made.now += number * 10**8
            self.feed(ev.Ticked())
            for one in list(state.replicas.values()):
                if one.worker == "spawning":
                    self.feed(ev.WorkerStarted(one.id, one.epoch, 1))
                    self.feed(ev.WorkerDescribed(one.id, one.epoch, 1))
        elif what in ("moved", "loaded"):
            self.load(what, number)
        elif request is not None:
            on = (request.source, request.source_epoch)
            if what == "token" and request.state is RequestState.PREFILLING:
                self.feed(ev.FirstTokenProduced(*on, request.id))
            elif what == "import" and request.lease_id:
                self.feed(ev.ImportEnded(request.lease_id, 1000, 10))
            elif what == "end" and request.state is RequestState.DECODING:
                at = (request.target, request.target_epoch)
                self.feed(ev.GenerationEnded(*at, request.id, "stop", 5, "00"))

    def load(self, what: str, number: int) -> None:
        loading = self.made.state.in_states(*LOADING)
        if loading and what == "moved":
            replica = loading[number % len(loading)]
            self.feed(ev.LoadMoved(replica.id, replica.epoch, number % 30, 30, 30 * number, 1000))
        elif loading:
            replica = loading[number % len(loading)]
            on = (replica.id, replica.epoch)
            self.feed(ev.LoadEnded(*on, "digest", replica.source, 30, 1000, 64, 64))


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 40)), min_size=20, max_size=80),
)
def test_weights_and_kv_keep_out_of_each_others_way(
    described: bool, nvlink: bool, steps: list[tuple[str, int]]
) -> None:
    story = Story(world(described, nvlink))
    while story.made.state.in_states(*LOADING):
        story.load("loaded", 0)
    for what, number in steps:
        story.step(what, number)


def test_such_a_story_has_chains_beside_kv() -> None:
    """Or the property above would say nothing."""
    made = world(described=False, nvlink=False)
    while loading := made.state.in_states(*LOADING):
        made.load(loading[0].id)
    for request in range(1, 5):
        made.arrive(request)
        made.first_token(request)
    made.feed(ev.ScaleRequested(1, 8))
    kinds = {carries for _, carries in traffic(made.state)}
    assert kinds == {"kv", "weights"}
    feeding = made.state.feeding()
    assert feeding & {r.id for r in made.state.in_states(*LOADING)}, "an interior node"
