"""The original planner's formulas as they are, to compare with (reference 3.3).

In float32 as there, with its quirks: the KV of prefill replicas is compared with the high
bound twice (P2) and with what all decode replicas take in together (P3), each pass moves at
once and down by one at most, and loading replicas count like ready ones (P8). What stops the
original's process (no replica of a role, a low bound of 0) is refused by name.
"""

from math import ceil
from struct import pack, unpack
from typing import NamedTuple

from blitzd.control.demand import Inputs
from blitzd.control.policy import Policy


class Original(NamedTuple):
    """The eight numbers of its log line, and what follows."""

    min_decode_memory: int = 0
    max_decode_memory: int = 0
    min_decode_kv: int = 0
    max_decode_kv: int = 0
    min_prefill_tokens: int = 0
    max_prefill_tokens: int = 0
    min_prefill_kv: int = 0
    max_prefill_kv: int = 0
    prefill_delta: int = 0
    decode_delta: int = 0
    refusal: str = ""

    def pairs(self) -> tuple[tuple[str, int], ...]:
        """Wanted and given, as names and numbers."""
        return tuple(zip(self._fields[:8], self[:8], strict=True))


def f32(value: float) -> float:
    """The float32 nearest to `value`. One operation on float32 numbers, made in doubles and
    rounded once, is what float32 hardware gives: 53 bits are more than twice 24 and two."""
    found: float = unpack("<f", pack("<f", value))[0]
    return found


def original(have: Inputs, policy: Policy) -> Original:
    refusal = _refusal(have, policy)
    if refusal:
        return Original(refusal=refusal)
    prefill, decode = have.prefill, have.decode
    moved = max(1, decode * have.transfer_rate)
    ph, pl = _s(policy.prefill_backlog_high_ms), _s(policy.prefill_backlog_low_ms)
    mh, ml = _s(policy.transfer_backlog_high_ms), _s(policy.transfer_backlog_low_ms)
    dh, dl = f32(policy.decode_use_high_ppm / 1e6), f32(policy.decode_use_low_ppm / 1e6)
    min_dm, max_dm = (_quotient(have.kv_blocks, b, have.blocks_per_replica) for b in (dh, dl))
    min_dk, max_dk = (_quotient(have.moving_tokens, b, moved) for b in (mh, ml))
    min_pt, max_pt = (_quotient(have.waiting_tokens, b, have.prefill_rate) for b in (ph, pl))
    min_pk = max_pk = _quotient(have.moving_tokens, mh, moved)
    min_d, min_p = max(min_dm, min_dk), max(min_pt, min_pk)
    max_d, max_p = max(max_dm, max_dk, min_d), max(max_pt, max_pk, min_p)
    deltas = (
        _clamped(prefill, _delta(prefill, min_p, max_p), policy.min_prefill, policy.max_prefill),
        _clamped(decode, _delta(decode, min_d, max_d), policy.min_decode, policy.max_decode),
    )
    return Original(min_dm, max_dm, min_dk, max_dk, min_pt, max_pt, min_pk, max_pk, *deltas)


def _refusal(have: Inputs, policy: Policy) -> str:
    if not have.prefill or not have.decode:
        return "it stops without at least one replica of each role"
    bounds = (
        *(policy.decode_use_low_ppm, policy.decode_use_high_ppm),
        *(policy.transfer_backlog_low_ms, policy.transfer_backlog_high_ms),
        *(policy.prefill_backlog_low_ms, policy.prefill_backlog_high_ms),
    )
    if not all(bounds):
        return "it stops at a bound of 0"
    if not have.prefill_rate or not have.blocks_per_replica:
        return "it divides by a rate or a block count of 0"
    return ""


def _s(ms: int) -> float:
    return f32(ms / 1000)


def _quotient(demand: int, bound: float, capacity: int) -> int:
    return ceil(f32(f32(demand) / f32(bound * f32(capacity))))


def _delta(count: int, least: int, most: int) -> int:
    if least > count:
        delta = (least + most + 1) // 2 - count
    elif most < count:
        delta = most - count
    else:
        delta = 0
    return max(delta, -1, 1 - count)


def _clamped(count: int, delta: int, least: int, most: int) -> int:
    # Here at least one of each, since what follows would stop it too.
    return max(1, min(max(count + delta, least), most)) - count
