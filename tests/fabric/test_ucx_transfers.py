"""UCX transfers between healthy peers: exact bytes, refusals, cancellation, idling."""

import time

import pytest
from fabric_peers import PeerProcess, move, moved_digest
from hypothesis import given, settings, strategies as st

from blitzd.fabric import UcxFabric

MIB = 1 << 20


@pytest.fixture(scope="module")
def pair():
    peers = PeerProcess("r0/1"), PeerProcess("r1/1")
    yield peers
    for peer in peers:
        peer.end()


def expect_moved(source, target, size, cut, into, **both):
    tag, sending, receiving = move(
        source, target, size, cut, into, source_extra=both, target_extra=both
    )
    received = target.reply(receiving)
    assert received.get("digest") == moved_digest(tag, size, cut), received
    assert received["others_untouched"]
    assert source.reply(sending) == {"moved": received["moved"]}


@st.composite
def cuts(draw):
    """Two lists of disjoint segments of one buffer, in any order, with equal totals."""
    size = draw(st.integers(1, 3 * MIB))
    total = draw(st.integers(0, size))

    def one():
        count = draw(st.integers(1, 6))
        marks = sorted(draw(st.integers(0, total)) for _ in range(count - 1))
        lengths = [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]
        gaps = sorted(draw(st.integers(0, size - total)) for _ in range(count))
        starts, at = [], 0
        for gap, length in zip(gaps, lengths, strict=True):
            starts.append(gap + at)
            at += length
        return draw(st.permutations(list(zip(starts, lengths, strict=True))))

    return size, one(), one()


@settings(max_examples=25, deadline=None)
@given(cuts())
def test_any_segment_lists_arrive_exactly(pair, cut):
    size, source, target = cut
    expect_moved(*pair, size, source, target)


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 20 * MIB])
def test_sizes_around_a_chunk(pair, size):
    expect_moved(*pair, size, [(0, size)], [(0, size)])


@pytest.mark.parametrize("chunk", [64 << 10, MIB - 1, 1000])
def test_chunks_of_any_size_that_both_ends_agree_on(pair, chunk):
    size = 2 * MIB + 1
    expect_moved(*pair, size, [(0, size)], [(0, size)], chunk=chunk)


@pytest.mark.parametrize("chunk", [0, MIB + 1])
def test_a_chunk_that_the_transport_does_not_take_is_refused(pair, chunk):
    _, sending, receiving = move(
        *pair, 10, [(0, 10)], [(0, 10)], within=1, target_extra={"chunk": chunk}
    )
    assert f"chunk_bytes: {chunk}" in str(pair[1].reply(receiving))
    assert "error" in pair[0].reply(sending)


def test_both_directions_and_many_at_once_do_not_mix(pair):
    left, right = pair
    size = 5 * MIB
    started = []
    for source, target in [(left, right), (right, left)] * 6:
        started.append((source, target, *move(source, target, size, [(0, size)], [(0, size)])))
    for source, target, tag, sending, receiving in started:
        received = target.reply(receiving)
        assert received.get("digest") == moved_digest(tag, size, [(0, size)]), received
        assert source.reply(sending) == {"moved": size}


def test_a_receiver_that_expects_nothing_of_a_source_that_has_something(pair):
    source, target = pair
    _, sending, receiving = move(source, target, 8, [(0, 8)], [])
    assert source.reply(sending)["error"] == "SegmentError"
    assert target.reply(receiving)["moved"] == 0


def test_nothing_received_before_it_was_sent(pair):
    source, target = pair
    tag = UcxFabric.new_tag()
    arguments = {"tag": tag, "size": 1, "segments": []}
    assert target.call("receive", source=source.call("address"), **arguments)["moved"] == 0
    time.sleep(0.1)
    assert source.call("send", to=target.call("address"), seed=1, **arguments) == {"moved": 0}


def test_a_receiver_that_is_late_gets_everything(pair):
    source, target = pair
    tag, size = UcxFabric.new_tag(), 3 * MIB
    sending = source.post(
        "send", to=target.call("address"), tag=tag, seed=1, size=size, segments=[(0, size)]
    )
    time.sleep(0.8)
    received = target.call(
        "receive", source=source.call("address"), tag=tag, size=size, segments=[(0, size)]
    )
    assert received["digest"] == moved_digest(1, size, [(0, size)])
    assert source.reply(sending) == {"moved": size}


@pytest.mark.parametrize(("sent", "expected"), [(3 * MIB, 3 * MIB + 1), (5, 4), (0, 1)])
def test_totals_that_differ_end_both_sides(pair, sent, expected):
    source, target = pair
    _, sending, receiving = move(source, target, 4 * MIB, [(0, sent)], [(0, expected)])
    outcome = source.reply(sending)
    assert outcome["error"] == "SegmentError"
    assert f"{sent} bytes, but r1/1 expects {expected}" in outcome["text"]
    assert target.reply(receiving)["error"] == "PeerLost"
    expect_moved(source, target, MIB, [(0, MIB)], [(0, MIB)])


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_cancelled_transfer_ends_alone(pair, side):
    """Its other end hears of it at once; a neighbour over the same line is not touched."""
    source, target = pair
    size = 64 * MIB
    whole = [(0, size)]
    early = {"cancel_at": 2 * MIB}
    tag, sending, receiving = move(source, target, size, whole, whole)
    cancelled = move(source, target, size, whole, whole, **{f"{side}_extra": early})
    ends = source.reply(cancelled[1])["error"], target.reply(cancelled[2])["error"]
    assert ends == (
        ("CancelledError", "PeerLost") if side == "source" else ("PeerLost", "CancelledError")
    )
    received = target.reply(receiving)
    assert received.get("digest") == moved_digest(tag, size, whole), received
    assert source.reply(sending) == {"moved": size}


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_callback_that_raises_ends_its_own_transfer(pair, side):
    source, target = pair
    size = 16 * MIB
    whole = [(0, size)]
    broken = {"raise_at": 2 * MIB}
    _, sending, receiving = move(source, target, size, whole, whole, **{f"{side}_extra": broken})
    ends = source.reply(sending), target.reply(receiving)
    if side == "target":
        ends = ends[::-1]
    assert ends[0]["error"] == "FabricError" and "ZeroDivisionError" in ends[0]["text"]
    assert ends[1]["error"] == "PeerLost"
    expect_moved(source, target, MIB, [(0, MIB)], [(0, MIB)])


def test_closing_ends_transfers_on_both_sides_and_refuses_new_ones():
    source, target = PeerProcess("r2/1"), PeerProcess("r3/1")
    arguments = {"size": MIB, "segments": [(0, MIB)]}
    addresses = source.call("address"), target.call("address")
    unsent = target.post("receive", source=addresses[0], tag=UcxFabric.new_tag(), **arguments)
    unasked = source.post("send", to=addresses[1], tag=UcxFabric.new_tag(), seed=1, **arguments)
    time.sleep(0.3)
    target.call("close")
    closed = time.monotonic()
    assert target.reply(unsent)["error"] == "PeerLost"
    outcome = source.reply(unasked)
    assert outcome["error"] == "PeerLost" and outcome["at"] - closed < 1.0
    refused = target.call(
        "receive", source=source.call("address"), tag=1, size=1, segments=[(0, 1)]
    )
    assert refused["error"] == "FabricError" and "ended" in refused["text"]
    source.end()
    target.end()


def test_a_process_that_leaves_without_closing_leaves_cleanly():
    source, target = PeerProcess("r2/1"), PeerProcess("r3/1")
    expect_moved(source, target, MIB, [(0, MIB)], [(0, MIB)])
    for peer in (source, target):
        peer.post("leave")
        assert peer.gone() == 0


def test_a_deadline_ends_one_transfer_among_others(pair):
    """The source never sends; the peers talk of other things, so nobody seems dead."""
    source, target = pair
    size = 4 * MIB
    lonely = target.post(
        "receive",
        source=source.call("address"),
        tag=UcxFabric.new_tag(),
        size=size,
        segments=[(0, size)],
        within=0.8,
    )
    while not target.replied(lonely):
        expect_moved(source, target, size, [(0, size)], [(0, size)])
    outcome = target.reply(lonely)
    assert outcome["error"] == "TransferTimeout", outcome
    assert 0.8 <= outcome["took"] < 1.2


def test_a_source_that_lives_but_never_sends_is_waited_for_until_the_deadline(pair):
    """Longer than the watchdog would wait for a dead one."""
    source, target = pair
    outcome = target.call(
        "receive",
        source=source.call("address"),
        tag=UcxFabric.new_tag(),
        size=MIB,
        segments=[(0, MIB)],
        within=0.8,
    )
    assert outcome["error"] == "TransferTimeout"
    assert 0.8 <= outcome["took"] < 1.2
    expect_moved(source, target, MIB, [(0, MIB)], [(0, MIB)])


@pytest.mark.parametrize(
    ("segments", "word"),
    [([(0, 11)], "outside"), ([(-1, 2)], "outside"), ([(0, 6), (5, 2)], "two segments")],
)
def test_bad_segments_are_refused_by_name(pair, segments, word):
    source, target = pair
    refused = target.call(
        "receive", source=source.call("address"), tag=1, size=10, segments=segments
    )
    assert refused["error"] == "SegmentError"
    assert word in refused["text"]


def test_bad_address_and_tag_are_refused(pair):
    _, target = pair
    arguments = {"size": 10, "segments": [(0, 10)]}
    bad = target.call("receive", source=b"nonsense", tag=1, **arguments)
    assert bad["error"] == "ValueError" and "peer_address" in bad["text"]
    bad = target.call("receive", source=target.call("address"), tag=1 << 60, **arguments)
    assert bad["error"] == "ValueError" and "tag" in bad["text"]


def test_idle_after_work_costs_under_two_percent_of_a_core(pair):
    expect_moved(*pair, MIB, [(0, MIB)], [(0, MIB)])
    before = [peer.call("usage")["cpu"] for peer in pair]
    time.sleep(2.0)
    for peer, then in zip(pair, before, strict=True):
        assert peer.call("usage")["cpu"] - then < 0.04


def test_waiting_for_a_slow_peer_does_not_spin(pair):
    """Nothing is granted yet: pings only."""
    source, target = pair
    tag = UcxFabric.new_tag()
    sending = source.post(
        "send", to=target.call("address"), tag=tag, seed=1, size=MIB, segments=[(0, MIB)]
    )
    before = source.call("usage")["cpu"]
    time.sleep(0.4)
    assert source.call("usage")["cpu"] - before < 0.04
    target.call("receive", source=source.call("address"), tag=tag, size=MIB, segments=[(0, MIB)])
    assert source.reply(sending) == {"moved": MIB}
