"""Calls to one worker: each a coroutine that turns the answer, or its absence, into an
input for the driver."""

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, Protocol

import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import request_and_attempt, wire_id
from blitzd.proto.blitzd.engine import v1 as pb

LOAD_DEADLINE_S = 600.0
FILES = {"host": pb.FileAccess.HOST, "pool": pb.FileAccess.HOST, "disk": pb.FileAccess.DISK}
"""How a load takes the node's file, by the rung of the ladder."""
CALL_MARGIN_S = 1.0
"""A call outlives the hang deadline by this: silence is told as a hang, once, by the watch that
looks for it, and not by each call in its own words."""

# What a call to a worker can raise: its answer is an error, or there is no answer.
CallFailed = (GRPCError, StreamTerminatedError, OSError, TimeoutError)

F = pb.HandoverFault
FAULTS = {
    F.NONE: "",
    F.NOT_HELD: "not_held",
    F.EPOCH: "source",
    F.MISMATCH: "mismatch",
    F.NO_ROOM: "no_room",
    F.REFUSED: "refused",
    F.SOURCE: "source",
    F.STALLED: "stalled",
    F.CORRUPT: "corrupt",
    F.DEADLINE: "deadline",
    F.CANCELLED: "target",
    F.TARGET: "target",
}
"""As the log names them. An import that somebody else cancelled is the target's failure."""


class Reports(Protocol):
    """Where workers' answers go: the driver."""

    async def post(self, payload: Payload) -> None: ...

    async def deliver(self, replica: str, epoch: int, report: pb.StepReport) -> None: ...


class KvRoute(NamedTuple):
    """How an importing worker reaches the KV."""

    transport: pb.Transport
    source: str
    """Its endpoint."""
    rest: str
    """That of the one with the later layers; empty: the source has all."""


def describe_failure(error: BaseException) -> str:
    if isinstance(error, GRPCError):
        return f"{error.status.name.lower()}: {error.message or 'no message'}"
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class WorkerCalls:
    """The calls of one epoch of one replica."""

    def __init__(
        self, replica: str, epoch: int, stub: pb.EngineStub, reports: Reports, deadline_s: float
    ) -> None:
        """`deadline_s` is that of a call which only books something."""
        self._replica = replica
        self._epoch = epoch
        self._stub = stub
        self._reports = reports
        self._deadline_s = deadline_s

    async def load(
        self,
        model_path: str,
        blocks_total: int,
        peers: list[pb.WeightPeer],
        shards: list[pb.WeightPeer],
        how: cmd.LoadModel,
    ) -> None:
        request = pb.LoadModelRequest(
            model_path=model_path,
            blocks_total=blocks_total,
            peers=peers,
            file=FILES.get(how.rung, pb.FileAccess.UNSPECIFIED),
            floor_ms=how.floor_ms,
            live=how.live,
            shards=shards,
            chunk_bytes=how.chunk_bytes,
        )
        last = pb.LoadProgress()
        reason = "the worker's load stream ended early"
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                async for last in self._stub.load_model(request):
                    if not last.digest:
                        await self._reports.post(self._load_moved(last))
            if last.digest:
                reason = ""
        except CallFailed as error:
            reason = describe_failure(error)
        await self._reports.post(self._load_ended(last, reason))

    async def hold_weights(self, model_path: str) -> None:
        reason, size = "", 0
        try:
            call = pb.HoldWeightsRequest(model_path=model_path)
            size = (await self._stub.hold_weights(call, timeout=LOAD_DEADLINE_S)).bytes_total
        except CallFailed as error:
            reason = describe_failure(error)
        await self._reports.post(ev.PoolCopyEnded(self._replica, self._epoch, size, reason))

    def _load_moved(self, progress: pb.LoadProgress) -> ev.LoadMoved:
        return ev.LoadMoved(
            self._replica,
            self._epoch,
            progress.layers_ready,
            progress.layers_total,
            progress.bytes_loaded,
            progress.bytes_total,
            progress.source,
            progress.block_tokens,
            progress.blocks_total,
        )

    def _load_ended(self, progress: pb.LoadProgress, reason: str) -> ev.LoadEnded:
        return ev.LoadEnded(
            self._replica,
            self._epoch,
            progress.digest,
            progress.source,
            progress.layers_total,
            progress.bytes_total,
            progress.block_tokens,
            progress.blocks_total,
            reason,
        )

    async def health(self) -> pb.HealthReply:
        """With each answer the worker says what it holds. No deadline."""
        reply = await self._stub.health(pb.HealthRequest())
        held = reply.holdings
        if held is not None:
            await self._reports.post(
                ev.HoldingsReported(
                    self._replica,
                    self._epoch,
                    held.blocks,
                    tuple(map(request_and_attempt, held.request_ids)),
                    tuple(map(request_and_attempt, held.exports)),
                    held.transfers,
                    held.buffers,
                    tuple(held.peers),
                )
            )
        return reply

    async def prefill(self, command: cmd.StartPrefill, live: LiveRequest) -> None:
        if not live.runs(command.attempt):
            return
        call = pb.PrefillRequest(request=wire_request(live), hold=command.hold)
        await self._for_request(command, self._stub.prefill(call, timeout=self._deadline_s))

    async def decode_locally(self, command: cmd.DecodeLocally, live: LiveRequest) -> None:
        if not live.runs(command.attempt):
            return
        call = pb.ResumeHeldRequest(request_ids=[wire_id(live.request_id, live.attempt)])
        await self._for_request(command, self._stub.resume_held(call, timeout=self._deadline_s))

    async def _for_request(
        self, command: cmd.StartPrefill | cmd.DecodeLocally, call: Awaitable[object]
    ) -> None:
        try:
            await call
        except CallFailed as error:
            # A request that this worker finds invalid is so to every other one; anything
            # else is this worker's trouble.
            status = error.status if isinstance(error, GRPCError) else None
            prefill = isinstance(command, cmd.StartPrefill)
            refused = prefill and status is Status.INVALID_ARGUMENT
            why = describe_failure(error)
            on = (self._replica, self._epoch, command.request_id)
            errored = ev.RequestErrored(*on, why, command.attempt, lost=int(not refused))
            await self._reports.post(errored)

    async def follow_live(self, pair_id: int, call: pb.FollowLiveRequest) -> None:
        """Lasts as long as the pair does."""
        try:
            reply = await self._stub.follow_live(call, timeout=LOAD_DEADLINE_S)
            ended = (reply.taken, FAULTS[reply.fault], reply.reason)
        except CallFailed as error:
            ended = (0, "target", describe_failure(error))
        await self._reports.post(ev.FollowEnded(pair_id, self._replica, self._epoch, *ended))

    async def import_kv(self, command: cmd.ImportKv, live: LiveRequest, route: KvRoute) -> None:
        if not live.runs(command.attempt):
            return
        call = pb.ImportKvRequest(
            request=wire_request(live),
            lease_id=command.lease_id,
            source_replica=command.source,
            source_epoch=command.source_epoch,
            source_endpoint=route.source,
            transport=route.transport,
            stall_ms=command.stall_ms,
            checksums=command.checksums,
        )
        if command.rest:
            call.rest = pb.KvSource(
                replica_id=command.rest, epoch=command.rest_epoch, endpoint=route.rest
            )
            call.split_layer = command.split_layer
        ended = ev.ImportEnded(command.lease_id, 0, 0, "target", "the import ended without a word")
        try:
            async for report in self._stub.import_kv(call, timeout=command.cap_ms / 1e3):
                if report.ended:
                    ended = _import_ended(command.lease_id, report)
                else:
                    moved = ev.ImportProgressed(command.lease_id, report.bytes_moved)
                    await self._reports.post(moved)
        except CallFailed as error:
            ended = ev.ImportEnded(command.lease_id, 0, 0, "target", describe_failure(error))
        await self._reports.post(ended)


def _import_ended(lease_id: int, report: pb.ImportKvReport) -> ev.ImportEnded:
    ended = ev.ImportEnded(
        lease_id, report.bytes_moved, report.elapsed_ns, FAULTS[report.fault], report.reason
    )
    if report.fault is not F.CORRUPT:
        return ended
    return msgspec.structs.replace(
        ended,
        layer=report.layer,
        source_checksum=f"{report.source_checksum:016x}",
        target_checksum=f"{report.target_checksum:016x}",
    )


def wire_request(live: LiveRequest) -> pb.Request:
    request = live.request
    return pb.Request(
        request_id=wire_id(live.request_id, live.attempt),
        prompt_tokens=list(request.prompt_tokens),
        output_tokens=list(live.output),
        max_tokens=request.max_tokens,
        sampling=_wire_sampling(live),
    )


def _wire_sampling(live: LiveRequest) -> pb.Sampling:
    request = live.request
    return pb.Sampling(
        temperature=request.temperature,
        seed=live.seed,
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        typical_p=request.typical_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        bias_token_ids=[token for token, _ in request.logit_bias],
        bias_values=[value for _, value in request.logit_bias],
        logprobs=request.logprobs,
        # With the first token the client has had all of them.
        prompt_logprobs=None if live.output else request.prompt_logprobs,
    )
