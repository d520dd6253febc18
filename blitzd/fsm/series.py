"""A log as a time series: what there was at the end of each interval, what was done in it.

The first four columns are those of the original's feature `statistic` (one row every 500 ms);
the others show the burst, the replicas and the users' wait side by side.

What is done is known when it is over, so a row is given out once nothing is open that began
in it or before. Prompt tokens count where the prompt was ready. The log holds no single
tokens: those after the first are spread evenly from there to the request's end, or to where
it was lost. Their sum over all rows is exact.
"""

from collections import deque

import msgspec

from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm.entities import Request
from blitzd.fsm.index import BEING_PREFILLED
from blitzd.fsm.replaying import replay_one
from blitzd.fsm.request import RequestState
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import LOADING, ReplicaState

MS = 1_000_000

S = ReplicaState
PREFILL_SIDE = (S.PREFILL, S.NEW_PREFILL, S.REFACTORY_PREFILL, S.OLD_PREFILL, S.COLOCATED)


class Row(msgspec.Struct):
    """An interval. Counts and states are those at its end."""

    epoch: int
    """The row's number, from 0."""
    prefill_tokens: int = 0
    """Of prompts that were ready in it, and of output that had to be computed again."""
    decode_tokens: int = 0
    """Output tokens but the first of each prompt."""
    unix_ms: int = 0
    """Its end, by the wall clock of the boot's first record and the core's clock since."""
    boot_epoch: int = 0
    prefill_replicas: int = 0
    """That serve, in live pairs and colocated ones too."""
    decode_replicas: int = 0
    """That serve, colocated ones too."""
    loading_replicas: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    prefilling_requests: int = 0
    migrating_requests: int = 0
    decoding_requests: int = 0
    kv_blocks: int = 0
    """In use or reserved, of all replicas."""
    kv_bytes: int = 0
    """Handed over, in the interval as all that follows; counted where a hand-over has ended."""
    weights_bytes: int = 0
    """Loaded, from peers or from a file; counted where a load has ended."""
    arrived_requests: int = 0
    finished_requests: int = 0
    first_tokens: int = 0
    """Requests whose first token came."""
    ttft_mean_ms: int = 0
    """Of these, from arrival; 0 when there are none."""
    ttft_max_ms: int = 0


class _Decoding(msgspec.Struct, gc=False):
    """A request that has tokens, and until when they are accounted for."""

    since_ns: int
    tokens: int


class Series:
    """Give it every record in order; each call returns the rows that are complete with it."""

    def __init__(self, state: ClusterState, every_ms: int) -> None:
        """`state` is that of all records before."""
        self._state = state
        self._every_ns = every_ms * MS
        self._begin_ns: int | None = None
        """Of this boot's first row, by the core's clock."""
        self._wall_ns = 0
        self._rows: deque[Row] = deque()
        """Of this boot, those not given out yet; the last one is under way."""
        self._given = 0
        """Rows of this boot that were."""
        self._next_epoch = 0
        self._decoding: dict[int, _Decoding] = {}
        """By request, in order of `since_ns`, since time does not go back."""
        self._told: set[int] = set()
        """Requests whose first token has been counted."""
        self._waited_ns: list[int] = []
        """Of the first tokens of the row under way."""

    def take(self, record: Record) -> list[Row]:
        """Folds `record`. Raises what the fold raises."""
        done: list[Row] = []
        if type(record.payload) is ev.Booted or self._begin_ns is None:
            done = self.finish()
            self._begin(record)
        self._reach(record.mono_ns)
        request_id = getattr(record.payload, "request_id", 0)
        request = self._state.requests.get(request_id)
        if request is not None:
            self._count(record, request)
        replay_one(self._state, record)
        self._count_alone(record.payload)
        if request is not None and request_id not in self._state.requests:
            self._decoding.pop(request_id, None)
            self._told.discard(request_id)
        return done + self._complete()

    def finish(self) -> list[Row]:
        """The rest: the row under way, and those that wait for requests which the log does
        not see the end of."""
        if self._rows:
            self._close(self._rows[-1])
        rest, self._begin_ns = list(self._rows), None
        self._rows.clear()
        self._decoding.clear()
        self._told.clear()
        return rest

    def _begin(self, record: Record) -> None:
        self._begin_ns, self._wall_ns = record.mono_ns, record.wall_ns
        self._given = 0
        self._append()

    def _append(self) -> None:
        self._rows.append(Row(self._next_epoch))
        self._next_epoch += 1

    def _reach(self, mono_ns: int) -> None:
        """Closes the rows that end before `mono_ns`."""
        assert self._begin_ns is not None
        last = (mono_ns - self._begin_ns) // self._every_ns
        while self._given + len(self._rows) <= last:
            self._close(self._rows[-1])
            self._append()

    def _complete(self) -> list[Row]:
        """Rows that no open request can still add to."""
        assert self._begin_ns is not None
        oldest = next(iter(self._decoding.values()), None)
        kept = len(self._rows) - 1
        if oldest is not None:
            at = (oldest.since_ns - self._begin_ns) // self._every_ns - self._given
            kept = min(kept, at)
        self._given += kept
        return [self._rows.popleft() for _ in range(kept)]

    def _close(self, row: Row) -> None:
        """States and counts, as they are now."""
        assert self._begin_ns is not None
        state, index = self._state, self._state.index
        ends_ns = (self._given + len(self._rows)) * self._every_ns
        row.unix_ms = (self._wall_ns + ends_ns) // MS
        row.boot_epoch = state.node.boot_epoch
        row.prefill_replicas = len(state.in_states(*PREFILL_SIDE))
        row.decode_replicas = len(state.in_states(S.DECODE, S.COLOCATED))
        row.loading_replicas = len(state.in_states(*LOADING))
        row.queued_requests = index.requests[RequestState.QUEUED]
        row.queued_tokens = index.tokens[RequestState.QUEUED]
        row.prefilling_requests = sum(index.requests[state] for state in BEING_PREFILLED)
        row.migrating_requests = index.requests[RequestState.MIGRATING]
        row.decoding_requests = index.requests[RequestState.DECODING]
        row.kv_blocks = index.reserved.total()
        waited_ns, self._waited_ns = self._waited_ns, []
        row.first_tokens = len(waited_ns)
        if waited_ns:
            row.ttft_mean_ms = sum(waited_ns) // len(waited_ns) // MS
            row.ttft_max_ms = max(waited_ns) // MS

    def _count_alone(self, event: Payload) -> None:
        """What the event says by itself."""
        row = self._rows[-1]
        if type(event) is ev.RequestAccepted:
            row.arrived_requests += 1
        elif type(event) is ev.MigrationFinished:
            row.kv_bytes += event.bytes_moved
        elif type(event) is ev.LoadFinished:
            row.weights_bytes += event.bytes_total

    def _count(self, record: Record, request: Request) -> None:
        """What the event says was done for `request`, which is as it was before."""
        event, row = record.payload, self._rows[-1]
        if type(event) is ev.PrefillFinished:
            self._prompt_ready(request, record.mono_ns)
        elif type(event) is ev.RequestFinished:
            if request.state in BEING_PREFILLED:  # with its only token
                self._prompt_ready(request, record.mono_ns)
            self._spread(request.id, event.output_tokens, record.mono_ns)
            row.finished_requests += 1
        elif type(event) in (ev.RequestFailed, ev.RequestResumed):
            output: int = event.output_tokens  # type: ignore[attr-defined]
            self._spread(request.id, output, record.mono_ns)

    def _prompt_ready(self, request: Request, now_ns: int) -> None:
        self._rows[-1].prefill_tokens += request.known_tokens
        self._decoding[request.id] = _Decoding(now_ns, request.output_tokens + 1)
        if request.id not in self._told and not request.output_tokens:
            self._told.add(request.id)
            self._waited_ns.append(now_ns - request.arrived_ns)

    def _spread(self, request_id: int, output_tokens: int, now_ns: int) -> None:
        """The tokens since the first, evenly over the time since then. A request that had its
        first token before the log begins is left out: nobody knows when."""
        decoding = self._decoding.pop(request_id, None)
        if decoding is None or output_tokens <= decoding.tokens:
            return
        assert self._begin_ns is not None
        tokens, took_ns = output_tokens - decoding.tokens, now_ns - decoding.since_ns
        first = (decoding.since_ns - self._begin_ns) // self._every_ns
        done = 0
        for row in range(first - self._given, len(self._rows)):
            ends_ns = self._begin_ns + (self._given + row + 1) * self._every_ns
            passed_ns = min(ends_ns, now_ns) - decoding.since_ns
            by_then = tokens * passed_ns // took_ns if passed_ns < took_ns else tokens
            self._rows[row].decode_tokens += by_then - done
            done = by_then
