"""The planner: how many replicas of each role there should be, and why.

Theory of operation
-------------------
A pass reads what there is (`demand`), what that needs (`sizing`), and says a word for each
role. It costs the same for ten replicas and for ten thousand, since all it reads is counted
in the fold, and it runs with each tick of the core's clock.

*Up* happens at once, to the middle of what is needed. *Down* happens after the load was low
for `scale_down_window_ms`, to the most that it needed meanwhile, and the window begins only
when all replicas of the role serve, since one that was never ready is not idle, and when none
of the last way down has work left, since until then the rest have not felt it. So a step in load
turns the direction at most once in a window, and a role is not scaled up because of its own
way down (the bounds are apart; see `sizing`).

*Only ready and loading replicas count.* Failed ones are added to what is wanted, so that a
spare takes their place while they are tried again; they are not counted on.

*Warm spares* are kept for `null_ttl_ms` whatever the plan says. The plan sets counts, and
`roles.scale` carries them out by the ladder that all changes of role share.

*Records.* A change of counts is an event with its inputs, terms and clamps. So is the reason
not to change anything, once: when the reason turns into another, or when a wait has seen a
higher need. Waiting ticks write nothing, and waits begin at most once in `plan_tick_ms`.

*Two writers.* Counts have one owner. While the planner is on, an operator who sets them owns
them for `manual_hold_ms`, for ever by default, until they are released; the planner says that
they are pinned and goes on to show what it would do. The hold is explicit because whoever
scales by hand in trouble wants it to stay so, and sees in the status that it does.
"""

from typing import NamedTuple

from blitzd.control.demand import Inputs, observe
from blitzd.control.policy import Policy
from blitzd.control.sizing import Need, Sizes, sizes
from blitzd.control.sizing_original import Original, original
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import ClusterState
from blitzd.fsm.plan import Plan, Wait

CHANGES = ("up", "down", "observed")


class Verdict(NamedTuple):
    """On one role."""

    word: str
    target: int
    """Replicas that are ready or loading."""
    peak: int = 0
    """While it waits to go down: the most that was needed."""


class Decision(NamedTuple):
    terms: Sizes | Original
    prefill: Verdict
    decode: Verdict
    clamps: tuple[str, ...]

    @property
    def changes(self) -> bool:
        return self.prefill.word in CHANGES or self.decode.word in CHANGES


def plan(turn: Turn) -> None:
    """Part of every turn; does something at ticks, and when an operator touches the counts."""
    if not turn.policy.autoscale or turn.state.node.phase != "running":
        return
    roles = turn.state.index.roles
    if not roles["prefill"] + roles["decode"]:
        return  # replicas that do both are as many as they were configured
    if isinstance(turn.trigger, ev.Ticked):
        _end_hold(turn)
        _pass(turn)
    elif _operator_set_counts(turn):
        turn.emit(ev.PlannerPinned(turn.policy.manual_hold_ms * MS))


def _operator_set_counts(turn: Turn) -> bool:
    """Also to what they were: then he wants them to stay so."""
    events = [type(record.payload) for record in turn.records]
    scaled = isinstance(turn.trigger, ev.ScaleRequested) and ev.CommandRefused not in events
    return scaled or ev.ScaleSet in events


def release_requested(turn: Turn, _: ev.ReleaseRequested) -> None:
    if not turn.policy.autoscale:
        reason = "the planner is off (autoscale is 0): nothing is pinned"
        turn.emit(ev.CommandRefused("release", "", reason))
    elif turn.state.plan.pinned:
        turn.emit(ev.PlannerReleased("operator"))


def _end_hold(turn: Turn) -> None:
    plan = turn.state.plan
    if plan.pinned and plan.hold_ns and turn.mono_ns >= plan.pinned_ns + plan.hold_ns:
        turn.emit(ev.PlannerReleased("hold is over"))


def _pass(turn: Turn) -> None:
    have = observe(turn.state, turn.policy, turn.mono_ns)
    decision = decide(turn.state, turn.policy, turn.mono_ns, have)
    plan, tick_ns = turn.state.plan, turn.policy.plan_tick_ms * MS
    words = (decision.prefill.word, decision.decode.word)
    if decision.changes:
        if not plan.decided_ns or turn.mono_ns >= plan.decided_ns + tick_ns:
            wanted = (
                max(1, decision.prefill.target + have.prefill_dead),
                max(1, decision.decode.target + have.decode_dead),
            )
            numbers = (have.pairs(), decision.terms.pairs())
            turn.emit(ev.PlanDecided(*wanted, *words, *numbers, decision.clamps))
    elif _worth_a_record(plan, decision, turn.mono_ns >= plan.held_ns + tick_ns):
        peaks = (decision.prefill.peak, decision.decode.peak)
        numbers = (have.pairs(), decision.terms.pairs())
        turn.emit(ev.PlanHeld(*words, *peaks, *numbers, decision.clamps))


def _worth_a_record(plan: Plan, decision: Decision, tick_over: bool) -> bool:
    """A wait that ends, or has seen more, is recorded at once: what comes after it counts
    from there. That one begins can wait for the tick."""
    pairs = ((plan.prefill, decision.prefill), (plan.decode, decision.decode))
    changed = [was.verdict != now.word for was, now in pairs]
    ended = any(was.verdict == "down_wait" != now.word for was, now in pairs)
    more = any(was.verdict == now.word and now.peak > was.peak for was, now in pairs)
    return more or ended or (any(changed) and (tick_over or not plan.seq))


def decide(state: ClusterState, policy: Policy, now_ns: int, have: Inputs) -> Decision:
    """What the planner says of `have`, given what it said before."""
    if policy.plan_original:
        return _as_the_original(state, have, policy)
    need = sizes(have, policy)
    clamps: list[str] = []
    plan = state.plan
    prefill = _role("prefill", have, need.prefill(), plan.prefill, policy, now_ns)
    grows = prefill.word == "up"
    decode = _role("decode", have, need.decode(grows), plan.decode, policy, now_ns)
    clamps += _bounds_hit(need, grows, policy)
    prefill, decode = _shared(have, prefill, decode, clamps)
    prefill = _known(prefill, have)
    prefill, decode = _as_observed(state, have, prefill, decode)
    if plan.pinned:
        prefill, decode = Verdict("pinned", have.prefill), Verdict("pinned", have.decode)
    return Decision(need, prefill, decode, tuple(clamps))


def _limits(policy: Policy, role: str) -> tuple[int, int]:
    """Whatever is configured, at least one is wanted: none at all means no plan."""
    least: int = max(1, getattr(policy, f"min_{role}"))
    return least, max(least, getattr(policy, f"max_{role}"))


def _role(role: str, have: Inputs, need: Need, was: Wait, policy: Policy, now_ns: int) -> Verdict:
    count: int = getattr(have, role)
    low, high = _limits(policy, role)
    least, most = (min(max(n, low), high) for n in need)
    if count < least:
        return Verdict("up", (least + most + 1) // 2)
    if count <= most:
        return Verdict("at_max" if need.least > count else "steady", count)
    if getattr(have, f"{role}_loading"):
        return Verdict("loading", count)
    if getattr(have, f"{role}_draining"):
        return Verdict("draining", count)
    if was.verdict != "down_wait":
        return Verdict("down_wait", count, most)
    peak = max(was.peak, most)
    if now_ns < was.since_ns + policy.scale_down_window_ms * MS:
        return Verdict("down_wait", count, peak)
    # Replicas may have been lost meanwhile: then it waits again.
    return Verdict("down", peak) if peak < count else Verdict("steady", count)


def _bounds_hit(need: Sizes, grows: bool, policy: Policy) -> list[str]:
    found = []
    for role, wanted in (("prefill", need.prefill()), ("decode", need.decode(grows))):
        low, high = _limits(policy, role)
        if wanted.least > high:
            found.append(f"max_{role}")
        if wanted.most < low:
            found.append(f"min_{role}")
    return found


def _shared(
    have: Inputs, prefill: Verdict, decode: Verdict, clamps: list[str]
) -> tuple[Verdict, Verdict]:
    """What is wanted more of comes from what still drains from the role, from spares, and from
    what the other role gives up. If the latter are too few for both, they take turns, decode
    first: without it nothing ends."""
    counts, drain = (have.decode, have.prefill), (have.decode_draining, have.prefill_draining)
    more = [max(0, v.target - n) for v, n in zip((decode, prefill), counts, strict=True)]
    got = [min(wanted, there) for wanted, there in zip(more, drain, strict=True)]
    given = max(0, have.prefill - prefill.target) + max(0, have.decode - decode.target)
    supply = have.spare + given
    if sum(more) - sum(got) <= supply:
        return prefill, decode
    clamps.append("no_spare")
    share = [0, 0]
    for _ in range(supply):
        left = [more[side] - got[side] - share[side] for side in (0, 1)]
        share[0 if left[0] and (share[0] <= share[1] or not left[1]) else 1] += 1
    decode, prefill = (
        verdict if not wanted else Verdict("up" if extra else "no_spare", count + extra)
        for verdict, wanted, extra, count in zip(
            (decode, prefill),
            more,
            (got[0] + share[0], got[1] + share[1]),
            counts,
            strict=True,
        )
    )
    return prefill, decode


def _known(verdict: Verdict, have: Inputs) -> Verdict:
    """Before a prompt was computed nobody knows how long those that wait will take."""
    demand = have.waiting_tokens or have.arrival_rate
    if demand and not have.prefill_rate and verdict.target <= have.prefill:
        return Verdict("no_rate", have.prefill)
    return verdict


def _as_observed(
    state: ClusterState, have: Inputs, prefill: Verdict, decode: Verdict
) -> tuple[Verdict, Verdict]:
    """Counts that were set before and that are no longer what is there (an operator drained
    one, say) are no wish of the planner's. Those that are wanted already and cannot be had
    yet (they have work to finish in the other role, say) are not decided again."""
    node = state.node
    sides = (
        (prefill, have.prefill, have.prefill_dead, node.wanted_prefill),
        (decode, have.decode, have.decode_dead, node.wanted_decode),
    )
    prefill, decode = (_against(*side) for side in sides)
    return prefill, decode


def _against(verdict: Verdict, count: int, dead: int, wanted: int) -> Verdict:
    if verdict.word == "up" and verdict.target + dead == wanted:
        return Verdict("asked", count)
    if verdict.word == "steady" and wanted and count and count + dead != wanted:
        return Verdict("observed", count)
    return verdict


def _as_the_original(state: ClusterState, have: Inputs, policy: Policy) -> Decision:
    found = original(have, policy)
    still = "refused" if found.refusal else "steady"
    prefill, decode = (
        Verdict("up" if delta > 0 else "down" if delta < 0 else still, count + delta)
        for count, delta in (
            (have.prefill, found.prefill_delta),
            (have.decode, found.decode_delta),
        )
    )
    clamps: list[str] = [found.refusal] if found.refusal else []
    prefill, decode = _shared(have, prefill, decode, clamps)
    if state.plan.pinned:
        prefill, decode = Verdict("pinned", have.prefill), Verdict("pinned", have.decode)
    return Decision(found, prefill, decode, tuple(clamps))
