"""The planner's equations: by hand, against the original's, and over all counts."""

import pytest
from hypothesis import given, settings, strategies as st

from blitzd.control.demand import Inputs
from blitzd.control.planner import decide
from blitzd.control.policy import Policy
from blitzd.control.sizing import sizes
from blitzd.control.sizing_original import Original, original
from blitzd.fsm import ClusterState

PAPER = Policy(
    prefill_backlog_high_ms=700,
    prefill_backlog_low_ms=500,
    decode_use_high_ppm=950_000,
    decode_use_low_ppm=750_000,
    transfer_backlog_high_ms=800,
    transfer_backlog_low_ms=400,
    max_prefill=14,
    max_decode=14,
    plan_original=1,
)
"""The 8B model's of the paper (reference 3.4)."""


def example(prefill: int, decode: int, waiting: int, blocks: int, moving: int) -> Inputs:
    return Inputs(
        prefill_ready=prefill,
        decode_ready=decode,
        waiting_tokens=waiting,
        kv_blocks=blocks,
        moving_tokens=moving,
        prefill_rate=15_000,
        transfer_rate=96_000,
        blocks_per_replica=30_000,
    )


WORKED = [
    (example(2, 2, 60_000, 10_000, 0), (5, -1), (6, 8)),
    (example(6, 2, 0, 0, 0), (-1, -1), (0, 0)),
    (example(1, 1, 0, 0, 0), (0, 0), (0, 0)),
    (example(4, 2, 20_000, 60_000, 512_000), (0, 4), (2, 3)),
]


@pytest.mark.parametrize(("have", "deltas", "tokens"), WORKED)
def test_the_worked_examples_as_the_original(
    have: Inputs, deltas: tuple[int, int], tokens: tuple[int, int]
) -> None:
    """Reference 16.3."""
    found = original(have, PAPER)
    assert (found.prefill_delta, found.decode_delta) == deltas
    assert (found.min_prefill_tokens, found.max_prefill_tokens) == tokens
    assert not found.refusal


def test_the_last_worked_example_in_all_its_numbers() -> None:
    assert original(WORKED[3][0], PAPER) == Original(3, 3, 4, 7, 2, 3, 4, 4, 0, 4)


def test_the_worked_examples_as_ours() -> None:
    """The same where the original is right: prefill by tokens, decode by memory. Its KV terms
    divide by what all replicas do (P3): 512,000 tokens at 0.4 s and 96,000 a second are 7
    replicas by its quotient of totals, 14 by a quotient of one's."""
    first, last = sizes(WORKED[0][0], PAPER), sizes(WORKED[3][0], PAPER)
    assert first.prefill_backlog == (6, 8)
    assert first.decode_use == (1, 1)
    assert last.prefill() == (2, 3), "KV that waits to leave is no reason for prefills"
    assert last.decode_use == (3, 3)
    assert last.decode_transfer == (7, 14)
    assert sizes(WORKED[1][0], PAPER).prefill() == sizes(WORKED[1][0], PAPER).decode(True) == (0, 0)


def test_float32_loses_tokens_where_integers_do_not() -> None:
    """Above 2**24 it has no odd numbers: 16,779,001 tokens are one fewer there."""
    have = example(1, 1, 16_779_001, 0, 0)
    assert original(have, PAPER).min_prefill_tokens == 1598
    assert sizes(have, PAPER).prefill_backlog.least == 1599


@pytest.mark.parametrize(
    ("have", "refusal"),
    [
        (example(0, 1, 5, 5, 5), "it stops without at least one replica of each role"),
        (
            Inputs(prefill_ready=1, decode_ready=1),
            "it divides by a rate or a block count of 0",
        ),
    ],
)
def test_what_stops_the_original_is_refused_by_name(have: Inputs, refusal: str) -> None:
    assert original(have, PAPER) == Original(refusal=refusal)


def test_the_original_s_default_bound_of_zero_is_refused() -> None:
    """P1: its command line's default aborts on the first pass. Ours leaves the term out."""
    policy = Policy(transfer_backlog_low_ms=0)
    assert original(WORKED[3][0], policy).refusal == "it stops at a bound of 0"
    assert sizes(WORKED[3][0], policy).decode_transfer == (0, 0)


def test_external_numbers_are_values_and_not_ratios() -> None:
    """Peers #10: a demand of 7 replicas' worth is 7 replicas, however many there are now."""
    for count in (1, 3, 7, 20):
        have = Inputs(prefill_ready=count, arrival_rate=7 * 8_000, prefill_rate=10_000)
        assert sizes(have, Policy()).prefill_use.least == 7


COUNTS = st.integers(0, 20)
AMOUNTS = st.integers(0, 10**9)
HAVE = st.builds(
    Inputs,
    prefill_ready=COUNTS,
    prefill_loading=COUNTS,
    prefill_dead=COUNTS,
    prefill_draining=COUNTS,
    decode_ready=COUNTS,
    decode_loading=COUNTS,
    decode_dead=COUNTS,
    decode_draining=COUNTS,
    spare=COUNTS,
    waiting_tokens=AMOUNTS,
    arrival_rate=AMOUNTS,
    prefill_rate=AMOUNTS,
    kv_blocks=AMOUNTS,
    coming_blocks=AMOUNTS,
    blocks_per_replica=AMOUNTS,
    moving_tokens=AMOUNTS,
    transfer_rate=AMOUNTS,
)
BOUNDS = st.integers(0, 2_000_000)
POLICIES = st.builds(
    Policy,
    min_prefill=COUNTS,
    max_prefill=COUNTS,
    min_decode=COUNTS,
    max_decode=COUNTS,
    prefill_backlog_high_ms=BOUNDS,
    prefill_backlog_low_ms=BOUNDS,
    prefill_use_high_ppm=BOUNDS,
    prefill_use_low_ppm=BOUNDS,
    decode_use_high_ppm=BOUNDS,
    decode_use_low_ppm=BOUNDS,
    transfer_backlog_high_ms=BOUNDS,
    transfer_backlog_low_ms=BOUNDS,
    plan_original=st.integers(0, 1),
)


@given(have=HAVE, policy=POLICIES)
@settings(max_examples=300, deadline=None)
def test_over_all_counts_no_plan_is_outside_a_bound(have: Inputs, policy: Policy) -> None:
    """Peers #26, and defects P1-P4 and P7: zeros, bounds that are 0 or the wrong way round,
    minima above maxima. Integers throughout, so that nothing is NaN and nothing wraps."""
    found = decide(ClusterState(), policy, 0, have)
    supply = have.spare + have.prefill_draining + have.decode_draining
    for role, verdict in (("prefill", found.prefill), ("decode", found.decode)):
        count = getattr(have, role)
        low = max(1, getattr(policy, f"min_{role}"))
        high = max(low, getattr(policy, f"max_{role}"))
        assert type(verdict.target) is int
        assert verdict.target >= 0
        if verdict.word == "up":
            assert count < verdict.target
            assert policy.plan_original or verdict.target <= high
        elif verdict.word == "down":
            assert 1 <= verdict.target < count
            assert policy.plan_original or verdict.target >= low
        else:
            assert verdict.target == count
        supply -= verdict.target - count
    assert supply >= 0, "no more is given than is there"
    assert all(type(number) is int and number >= 0 for _, number in found.terms.pairs())


@given(have=HAVE, policy=POLICIES)
@settings(max_examples=300, deadline=None)
def test_least_is_never_more_than_most(have: Inputs, policy: Policy) -> None:
    found = sizes(have, policy)
    for need in (*found, found.prefill(), found.decode(True), found.decode(False)):
        assert 0 <= need.least <= need.most
