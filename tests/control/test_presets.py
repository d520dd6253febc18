"""The original's names as values of the policy, at run time; what they do to loads."""

import pytest

from blitzd.control import presets
from blitzd.control.commands import LoadModel
from blitzd.control.policy import Policy
from blitzd.control.presets import PresetRefused, expand
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, only, refold

S = ReplicaState
FEATURES = (
    "default impl_blitz impl_sllm manually_scale statistic mutate impl_rdma unidirect fast"
    " impl_fast impl_nvl impl_tanz impl_fast_pro live impl_live impl_live_pro test_live test_nvl"
    " test_tanz eval_sllm eval_sllm_pro eval_net eval_fast eval_all eval_fast_wo_nvl"
    " eval_fast_live_wo_nvl cache_all_miss cache_all_hit cache_replace motiv mock_transfer"
    " optimize_network_interference optimize_op_loading decode_load_balance ngrok buddy_nic"
    " sched_naive"
)


@pytest.mark.parametrize("name", FEATURES.split())
def test_every_feature_of_the_original_has_values_or_a_reason(name: str) -> None:
    try:
        values = expand(name)
    except PresetRefused as error:
        assert str(error).startswith(f"{name}: ") and len(str(error)) > len(name) + 20
    else:
        assert values and Policy.of(dict(Policy().pairs()) | values).conflicts() == []


@pytest.mark.parametrize(
    ("preset", "differs"),
    [
        ("blitzd", {}),
        ("impl_blitz", {"map": 0, "nvlink": 0, "shard": 0, "chain": 0}),
        ("impl_nvl", {"map": 0, "shard": 0, "chain": 0}),
        ("impl_fast", {"map": 0, "nvlink": 0, "shard": 0}),
        ("impl_fast,impl_nvl", {"map": 0, "shard": 0}),
        ("impl_tanz", {"map": 0}),
        ("impl_fast,impl_tanz", {"map": 0}),
        ("unidirect", {"map": 0, "nvlink": 0, "shard": 0, "chain": 0, "prefills_give": 1}),
    ],
)
def test_what_the_rungs_of_a_preset_are(preset: str, differs: dict[str, int]) -> None:
    found = expand(preset)
    assert {n for n in found if not n.startswith("ladder_")} == {"host_ttl_ms", "mutate_after_load"}
    ours = Policy()
    ladder = {n.removeprefix("ladder_"): v for n, v in found.items() if v != getattr(ours, n)}
    # The pool is in the paper, and in none of its builds.
    assert ladder == (differs and differs | {"pool": 0})


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("impl_slm", "no such preset; accepted: blitzd, default, "),
        ("impl_sllm", "exactly one of cache_replace, cache_all_hit, cache_all_miss"),
        ("cache_all_hit,cache_replace", "exactly one of"),
        ("impl_blitz,cache_replace", "accepted: one of the two"),
        ("cache_replace,impl_nvl", "impl_sllm loads nothing over the network"),
        ("mock_transfer", "accepted: motiv"),
        ("blitzd,impl_nvl", "accepted: it alone"),
        ("impl_fast,ngrok", "ngrok: nothing here opens a tunnel"),
        ("impl_fast,", "'': no such preset"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(preset: str, why: str) -> None:
    world = Harness().serving("prefill", "decode")
    before = dict(world.state.node.policy)
    refused = only(world.feed(ev.PolicyRequested((), preset)), ev.CommandRefused)
    assert (refused.command, refused.field, refused.code) == ("policy", "preset", "invalid")
    assert why in refused.reason
    assert world.state.node.policy == before


def test_a_preset_leaves_nothing_of_the_one_before_and_values_go_over_it() -> None:
    world = Harness().serving("prefill", "decode")
    world.feed(ev.PolicyRequested((("host_ttl_ms", 300_000),), "impl_sllm,cache_replace"))
    assert world.state.node.policy["host_ttl_ms"] == 300_000
    assert world.state.node.policy["ladder_host"] == 1
    changed = only(world.feed(ev.PolicyRequested((), "impl_blitz")), ev.PolicyChanged)
    assert ("ladder_host", 1, 0) in changed.changes
    now = world.state.node.policy
    assert {n: now[n] for n in presets.SWITCHES} == expand("impl_blitz")
    assert world.feed(ev.PolicyRequested((), "impl_blitz")) == []


def under(preset: str, *roles: str) -> Harness:
    world = Harness().serving(*roles)
    world.feed(ev.PolicyRequested((), preset))
    return world


def test_static_leaves_the_counts_alone() -> None:
    assert expand("static")["autoscale"] == expand("manually_scale")["autoscale"] == 0
    assert "autoscale" not in expand("impl_blitz")


@pytest.mark.parametrize(
    ("cache", "rungs"),
    [
        ("cache_all_hit", ["host", "host"]),
        ("cache_all_miss", ["disk", "disk"]),
        ("cache_replace", ["host", "disk"]),
    ],
)
def test_serverlessllm_loads_from_the_host_or_the_disk(cache: str, rungs: list[str]) -> None:
    """First while a replica has the weights, then once the last load was too long ago."""
    world = under(f"impl_sllm,{cache}", "prefill", "decode", "spare")
    warm = only(world.feed(ev.ScaleRequested(1, 2)), ev.LoadStarted)
    world.load("r2")
    world.after(29_000)
    for replica in ("r0", "r1", "r2"):
        world.feed(ev.WorkerExited(replica, 1, "killed"))
    world.after(2_000)
    world.now += 60_000_000_000
    cold = only(world.attach("r2"), ev.LoadStarted)
    assert [warm.rung, cold.rung] == rungs
    assert cold.source == rungs[1]


def test_the_hosts_copy_is_kept_from_a_load_on_for_its_time_and_folds_again() -> None:
    world = under("impl_sllm,cache_replace", "prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 2))
    assert only(world.load("r2"), ev.HostCopyKept).node == "local"
    loaded_ns = world.now
    for replica in ("r0", "r1", "r2"):
        world.feed(ev.WorkerExited(replica, 1, "killed"))
    world.after(29_999)
    assert world.state.node.host_copies == {"local": loaded_ns}
    assert only(world.after(1), ev.HostCopyDropped).node == "local"
    assert world.state.node.host_copies == {}
    assert refold(world.log).hash() == world.state.hash()
    cold = only(world.attach("r1"), ev.LoadStarted)
    assert cold.skipped[-2] == ("host", "no load left a copy here and no replica has the weights")


def test_a_copy_whose_weights_are_in_use_is_not_dropped() -> None:
    world = under("impl_sllm,cache_replace", "prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 2))
    world.load("r2")
    assert not [e for e in world.after(60_000) if isinstance(e, ev.HostCopyDropped)]


def test_serverlessllm_revives_nobody_and_reuses_only_in_the_same_role() -> None:
    world = under("impl_sllm,cache_all_hit", "prefill", "decode", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 1))
    [null] = world.state.in_states(S.SHUTTING_NULL)
    events = world.feed(ev.ScaleRequested(2, 1))
    assert only(events, ev.LoadStarted).replica == "r3"
    reused = only(world.feed(ev.ScaleRequested(2, 2)), ev.NullReused)
    assert (reused.replica, dict(reused.skipped)["revive"]) == (null.id, "off: ladder_revive is 0")


def test_serverlessllm_does_not_mutate_and_its_optimum_does() -> None:
    for preset, mutates in (("impl_sllm,cache_all_hit", False), ("eval_sllm_pro", True)):
        world = under(preset, "prefill", "prefill", "decode", "spare")
        events = world.feed(ev.ScaleRequested(1, 2))
        assert any(isinstance(e, ev.MutationStarted) for e in events) == mutates, preset


def test_floors_go_with_the_load_by_where_it_comes_from() -> None:
    world = under("impl_rdma", "prefill", "decode", "spare", "spare")
    world.feed(ev.PolicyRequested((("mock_load_ms", 700), ("mock_transfer_ms", 300))))
    world.feed(ev.ScaleRequested(1, 3))
    floors = {c.replica: (c.rung, c.floor_ms) for c in world.commanded(LoadModel)}
    assert floors == {"r2": ("p2p", 300), "r3": ("disk", 700)}
