"""How many replicas a load needs: the planner's equations.

Theory of operation
-------------------
Each equation compares a demand with what one replica can do, between two bounds. With
`least` replicas none is above its high bound, with `most` none is above the low one. Fewer
than `least`: scale up, to the middle. More than `most`: scale down, to `most`. In between:
leave it. With `most` replicas the load is at the low bound, so it must grow by the ratio of
the bounds before what was scaled down is too small (re-derived from reference 3.3; its
defects P1-P4, P6 and P8 are not here).

*Prefill demand.* W tokens wait and a replica computes R tokens per second, so W / R seconds
of work are shared by all; `prefill_backlog` bounds each one's share, which is what a new
prompt waits. A fast replica can be busy all the time without anything waiting whenever
somebody looks, so the tokens per second that arrive are bounded too, as a share of R
(`prefill_use`). The greater of both counts.

*Decode KV demand.* B blocks are in use or needed, a replica has M (`decode_use`). And K
tokens of KV wait to be moved while each replica takes in C per second (`transfer_backlog`).
The original compares K with what all replicas take in together and calls the quotient a
number of replicas; and it scales prefill by K too, though another prefill replica does not
empty one that waits.

*Decode pre-scaling.* When prefill goes up, what waits is about to become KV: decode is sized
for B and for what is coming together, so that both are loaded at the same time and not one
after the other.

Everything is an integer: bounds are milliseconds or millionths, and a quotient is rounded up.
"""

from typing import NamedTuple

from blitzd.control.demand import Inputs
from blitzd.control.policy import Policy

MILLION = 1_000_000


class Need(NamedTuple):
    """Replicas of a role."""

    least: int
    most: int


NONE = Need(0, 0)


class Sizes(NamedTuple):
    prefill_backlog: Need
    prefill_use: Need
    decode_use: Need
    decode_transfer: Need
    decode_ahead: Need
    """Holds only while prefill goes up."""

    def prefill(self) -> Need:
        return _greater(self.prefill_backlog, self.prefill_use)

    def decode(self, prefill_goes_up: bool) -> Need:
        found = _greater(self.decode_use, self.decode_transfer)
        return _greater(found, self.decode_ahead) if prefill_goes_up else found

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(
            pair
            for name, need in zip(self._fields, self, strict=True)
            for pair in ((f"{name}_least", need.least), (f"{name}_most", need.most))
        )


def sizes(have: Inputs, policy: Policy) -> Sizes:
    p = policy
    blocks = have.blocks_per_replica
    return Sizes(
        _need(
            have.waiting_tokens * 1000,
            have.prefill_rate,
            p.prefill_backlog_high_ms,
            p.prefill_backlog_low_ms,
        ),
        _need(
            have.arrival_rate * MILLION,
            have.prefill_rate,
            p.prefill_use_high_ppm,
            p.prefill_use_low_ppm,
        ),
        _need(have.kv_blocks * MILLION, blocks, p.decode_use_high_ppm, p.decode_use_low_ppm),
        _need(
            have.moving_tokens * 1000,
            have.transfer_rate,
            p.transfer_backlog_high_ms,
            p.transfer_backlog_low_ms,
        ),
        _need(
            (have.kv_blocks + have.coming_blocks) * MILLION,
            blocks,
            p.decode_use_high_ppm,
            p.decode_use_low_ppm,
        ),
    )


def _need(demand: int, capacity: int, high: int, low: int) -> Need:
    """`demand` and `capacity` in the units of `high` and `low`. Nothing is known of a
    capacity of 0, and a bound of 0 is none: the term is then left out."""
    if demand <= 0 or capacity <= 0 or high <= 0 or low <= 0:
        return NONE
    least = -(-demand // (high * capacity))
    return Need(least, max(least, -(-demand // (low * capacity))))


def _greater(one: Need, other: Need) -> Need:
    return Need(max(one.least, other.least), max(one.most, other.most))
