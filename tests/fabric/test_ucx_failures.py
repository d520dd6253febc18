"""UCX peers that die or stall in mid-transfer: the survivor, its error, and what comes after."""

import random
import signal
import time

import pytest
from fabric_peers import PeerProcess, move, moved_digest

MIB = 1 << 20
ROUNDS = 100
WARM = 10
BIG = 8 * MIB
PIECE = 98_304


def pieces(seed):
    """The whole of BIG in pieces of 96 KiB, in some order."""
    starts = list(range(0, BIG, PIECE))
    random.Random(seed).shuffle(starts)
    return [(start, min(PIECE, BIG - start)) for start in starts]


class Cast:
    """A survivor, a victim that dies and comes back as the next epoch, and a spare peer
    whose transfers with the survivor never stop."""

    def __init__(self):
        self.survivor = PeerProcess("survivor/1")
        self.spare = PeerProcess("spare/1")
        self.epoch = 1
        self.victim = PeerProcess("victim/1")
        self.beside = None
        self.spared = 0

    def keep_spare_busy(self):
        if self.beside is not None:
            tag, sending, receiving = self.beside
            if not (self.spare.replied(sending) and self.survivor.replied(receiving)):
                return
            self.settle_spare(tag, sending, receiving)
        whole = [(0, MIB)]
        self.beside = move(self.spare, self.survivor, MIB, whole, whole)

    def settle_spare(self, tag, sending, receiving):
        got = self.survivor.reply(receiving)
        assert got.get("digest") == moved_digest(tag, MIB, [(0, MIB)]), got
        assert self.spare.reply(sending) == {"moved": MIB}
        self.spared += 1

    def restart(self):
        self.epoch += 1
        self.victim = PeerProcess(f"victim/{self.epoch}")

    def end(self):
        for peer in (self.survivor, self.spare, self.victim):
            peer.end()


@pytest.fixture
def cast():
    it = Cast()
    yield it
    it.end()


def expect_good_transfer(source, target, seed):
    size = 2 * MIB + 17
    tag, sending, receiving = move(source, target, size, [(0, size)], [(0, size)])
    got = target.reply(receiving)
    assert got.get("digest") == moved_digest(tag, size, [(0, size)]), got
    assert source.reply(sending) == {"moved": size}


@pytest.mark.parametrize(
    ("dies", "rounds"),
    [
        ("source", 40),
        pytest.param("source", ROUNDS, marks=pytest.mark.slow),
        pytest.param("target", ROUNDS, marks=pytest.mark.slow),
    ],
)
def test_kills_in_mid_transfer(cast, dies, rounds):
    """Each kill is by the victim's own hand, so that it is in the middle for certain."""
    worst, usage = 0.0, {}
    for round_ in range(rounds):
        cast.keep_spare_busy()
        extra = {"die_at": random.Random(round_).randrange(1, BIG - MIB)}
        cut = pieces(round_)
        if dies == "source":
            _, _, ticket = move(
                cast.victim, cast.survivor, BIG, cut, [(0, BIG)], source_extra=extra
            )
        else:
            _, ticket, _ = move(
                cast.survivor, cast.victim, BIG, cut, [(0, BIG)], target_extra=extra
            )
        assert cast.victim.gone() == -signal.SIGKILL
        died = time.monotonic()
        cast.restart()
        outcome = cast.survivor.reply(ticket)
        assert outcome.get("error") == "PeerLost", outcome
        worst = max(worst, outcome["at"] - died)
        ends = (cast.victim, cast.survivor)
        expect_good_transfer(*(ends if dies == "source" else ends[::-1]), round_)
        if round_ in (WARM - 1, rounds - 1):
            usage[round_] = cast.survivor.call("usage")
    cast.settle_spare(*cast.beside)
    assert cast.survivor.alive
    assert worst < 1.0
    first, last = usage[WARM - 1], usage[rounds - 1]
    assert last["fds"] <= first["fds"]
    assert last["rss"] - first["rss"] < 32 * MIB
    assert last["held"] == 0
    assert cast.spared >= rounds // 4


@pytest.mark.parametrize("stops", ["source", "target"])
def test_a_stalled_peer_is_given_up_and_the_rest_goes_on(cast, stops):
    extra = {"stop_at": 2 * MIB}
    size = 4 * BIG
    whole = [(0, size)]
    if stops == "source":
        _, theirs, ticket = move(cast.victim, cast.survivor, size, whole, whole, source_extra=extra)
    else:
        _, ticket, theirs = move(cast.survivor, cast.victim, size, whole, whole, target_extra=extra)
    stopped = cast.victim.stopped()
    while not cast.survivor.replied(ticket):
        expect_good_transfer(cast.spare, cast.survivor, 1)
    outcome = cast.survivor.reply(ticket)
    assert outcome.get("error") == "PeerLost", outcome
    assert outcome["at"] - stopped < 1.0
    cast.victim.signal(signal.SIGCONT)
    assert cast.victim.reply(theirs)["error"] == "PeerLost"
    expect_good_transfer(cast.victim, cast.survivor, 2)
    expect_good_transfer(cast.survivor, cast.victim, 3)


@pytest.mark.parametrize("stops", ["source", "target"])
def test_a_stalled_peer_that_dies_at_last(cast, stops):
    size = 4 * BIG
    for round_ in range(3):
        ends = (cast.victim, cast.survivor)
        extra = {f"{stops}_extra": {"stop_at": 2 * MIB}}
        source, target = ends if stops == "source" else ends[::-1]
        _, sending, receiving = move(source, target, size, [(0, size)], [(0, size)], **extra)
        ticket = receiving if stops == "source" else sending
        assert cast.survivor.reply(ticket)["error"] == "PeerLost"
        cast.victim.signal(signal.SIGKILL)
        cast.victim.gone()
        cast.restart()
        expect_good_transfer(cast.victim, cast.survivor, round_)
        expect_good_transfer(cast.survivor, cast.victim, round_)
    assert cast.survivor.alive


def test_stalls_leave_nothing_behind(cast):
    """The chunks that a stopped peer was granted come back, as does the line."""
    size, usage = 4 * BIG, []
    for _ in range(5):
        _, theirs, ticket = move(
            cast.victim,
            cast.survivor,
            size,
            [(0, size)],
            [(0, size)],
            source_extra={"stop_at": 2 * MIB},
        )
        assert cast.survivor.reply(ticket)["error"] == "PeerLost"
        cast.victim.signal(signal.SIGCONT)
        assert cast.victim.reply(theirs)["error"] == "PeerLost"
        expect_good_transfer(cast.victim, cast.survivor, 1)
        usage.append(cast.survivor.call("usage"))
    assert usage[-1]["rss"] - usage[0]["rss"] < 16 * MIB
    assert usage[-1]["fds"] <= usage[0]["fds"]


def test_a_newer_epoch_retires_the_older(cast):
    old = cast.victim
    old_address = old.call("address")
    expect_good_transfer(old, cast.survivor, 1)
    cast.restart()
    expect_good_transfer(cast.victim, cast.survivor, 2)
    refused = cast.survivor.call("receive", source=old_address, tag=1, size=1, segments=[(0, 1)])
    assert refused["error"] == "IdentityMismatch"
    assert "victim/2" in refused["text"]
    old.end()


def test_nobody_at_the_address(cast):
    address = cast.victim.call("address")
    cast.victim.signal(signal.SIGKILL)
    cast.victim.gone()
    outcome = cast.survivor.call("receive", source=address, tag=1, size=1, segments=[(0, 1)])
    assert outcome["error"] == "PeerLost"
    assert outcome["took"] < 1.0
    cast.restart()
    expect_good_transfer(cast.victim, cast.survivor, 1)
