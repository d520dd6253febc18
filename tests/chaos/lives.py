"""What a log says became of each request: whoever was accepted finishes with all the tokens that
an undisturbed run gives, unless there is one of few reasons not to."""

import xxhash

from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.entities import RESUME_CAUSES
from tests.chaos.jobs import token_at
from tests.chaos.scenario import Faults


class Lives:
    """Shown each record in order, it asserts."""

    def __init__(self, policy: Policy, faults: Faults) -> None:
        self._policy = policy
        self._faults = faults
        self._arrivals: dict[int, ev.RequestArrived] = {}
        self._in_a_row: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def see(self, record: Record) -> None:
        payload = record.payload
        if isinstance(payload, ev.RequestArrived):
            self._arrivals[payload.request_id] = payload
        elif isinstance(payload, ev.RequestResumed):
            self._resumed(payload)
        elif isinstance(payload, ev.RequestFinished):
            self._finished(payload)
        elif isinstance(payload, ev.RequestFailed):
            assert self._may_fail(payload, record.mono_ns), payload

    def _resumed(self, resumed: ev.RequestResumed) -> None:
        key, tokens = resumed.request_id, resumed.output_tokens
        assert self._arrivals[key].resumable
        moved_on = tokens > self._tokens.get(key, 0)
        self._in_a_row[key] = 1 if moved_on else self._in_a_row.get(key, 0) + 1
        self._tokens[key] = tokens

    def _finished(self, finished: ev.RequestFinished) -> None:
        arrived = self._arrivals[finished.request_id]
        tokens = [token_at(arrived.seed, i) for i in range(arrived.max_tokens)]
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        expected = ("length", arrived.max_tokens, xxhash.xxh3_64_hexdigest(packed))
        assert (finished.finish, finished.output_tokens, finished.output_digest) == expected

    def _may_fail(self, failed: ev.RequestFailed, now_ns: int) -> bool:
        arrived = self._arrivals[failed.request_id]
        match failed.code:
            case "deadline":
                return now_ns >= arrived.deadline_ns
            case "resumes_exhausted":
                return self._in_a_row[failed.request_id] == self._policy.max_resumes
            case "engine_error" if arrived.resumable:
                return self._faults.refusal > 0
            case "links_down":
                return False  # its KV is whole: it waits
            case "drain_deadline" if arrived.resumable:
                # Nobody else served its role.
                return failed.reason.startswith("replica ")
        return failed.code in RESUME_CAUSES and not arrived.resumable
