"""The worker's RPCs (`engine.proto`). No torch at import, so that a worker can say who it
is while torch is still being read from disk."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

import blitzd
from blitzd.engine.calls import deadline
from blitzd.engine.errors import InvalidField, NotReady
from blitzd.engine.exporter import Exporter
from blitzd.engine.importer import Importer
from blitzd.engine.opening import STOP_S, discard, open_beside
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepared import Prepared
from blitzd.engine.relay import RelayFollower, RelaySource
from blitzd.engine.reports import Reports
from blitzd.engine.sources import Sources
from blitzd.engine.standby import Standby
from blitzd.engine.weights_load import WeightLoader
from blitzd.fabric import PLAIN, ArenaServer, Identity, Tls, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

if TYPE_CHECKING:
    from blitzd.engine.replica import Replica

log = structlog.get_logger()

LOAD_S = 600.0
ASK_S = 5.0
"""For an answer that takes milliseconds, unless a load has to begin first."""
HANDOVER_S = 60.0
"""Of a caller that sets no deadline; the daemon's is the lease's."""
LISTED = 64
"""Requests that a worker names among its holdings."""


class EngineService(pb.EngineBase):
    def __init__(
        self,
        identity: Identity,
        kv_socket: Path,
        options: ReplicaOptions,
        crashed: Callable[[BaseException], None],
        verify_kv: bool = False,
        tls: Tls = PLAIN,
    ) -> None:
        """`kv_socket` is where peers get the KV arena. `crashed` is called, in the event loop,
        when the step loop cannot go on. `tls` is for peers on other nodes."""
        self.endpoint = ""
        """HOST:PORT, once other nodes can call here."""
        self.last_heard = time.monotonic()
        """When a daemon last showed that it is there."""
        self._identity = identity
        self._kv_socket = kv_socket
        self._options = options
        self._crashed = crashed
        self._reports = Reports()
        self._ucx = UcxFabric(str(identity))
        self._importer = Importer(self._ucx, Sources(tls), verify_kv)
        self._exporter = Exporter(identity, self._ucx)
        self._relays = RelaySource(identity, self._ucx)
        self._follower = RelayFollower(self._ucx, Sources(tls), self._importer.mapped)
        self.standby = Standby()
        """For whoever has time before the first load."""
        self._weights = WeightLoader(
            identity,
            self._ucx,
            Sources(tls),
            options.weights,
            self.standby,
            kv_socket.with_suffix("").with_suffix(".w.sock"),
        )
        self._replica: Replica | None = None
        self._arena_server: ArenaServer | None = None
        self._progress = pb.LoadProgress()
        self._early: pb.LoadProgress | None = None
        """Of a live load: the newest."""
        self._loading = asyncio.Lock()
        self._unloading = asyncio.Lock()

    @property
    def attended(self) -> bool:
        """A daemon is watching right now."""
        return self._reports.watched

    async def start_fabric(self) -> None:
        """Ahead of the first transfer, which else waits for UCX at both of its ends."""
        try:
            await self._ucx.start()
        except Exception as error:
            # Whoever needs it says so to its caller.
            log.warning("UCX did not start", error=repr(error))

    async def close(self) -> None:
        """Ends transfers and the step loop, removes the KV socket. Idempotent."""
        await self._unload()
        await self._relays.close()
        await self._follower.close()
        await self._importer.close()
        await self._weights.close()
        await self._ucx.close()

    # -- who and how --------------------------------------------------------------------

    async def describe(self, message: pb.DescribeRequest) -> pb.DescribeReply:
        replica, progress = self._replica, self._progress
        reply = pb.DescribeReply(
            replica_id=self._identity.replica,
            epoch=self._identity.epoch,
            pid=os.getpid(),
            version=blitzd.__version__,
            layers_ready=progress.layers_ready,
            layers_total=progress.layers_total,
            bytes_loaded=progress.bytes_loaded,
            bytes_total=progress.bytes_total,
            model_digest=progress.digest,
            block_tokens=progress.block_tokens,
            endpoint=self.endpoint,
        )
        if replica is not None:
            now = replica.steps.occupancy
            reply.blocks_used, reply.blocks_total = now.blocks_used, now.blocks_total
            reply.running = now.running
        return reply

    async def health(self, message: pb.HealthRequest) -> pb.HealthReply:
        self.last_heard = time.monotonic()
        if self._replica is None:
            return pb.HealthReply()
        steps = self._replica.steps
        holdings = self._holdings(self._replica)
        return pb.HealthReply(step=steps.steps, idle_ns=steps.idle_ns, holdings=holdings)

    def _holdings(self, replica: "Replica") -> pb.Holdings:
        blocks, request_ids = replica.steps.holdings
        importing = self._importer.request_ids
        ids = dict.fromkeys([*request_ids, *importing])
        peers = dict.fromkeys([*map(str, self._importer.peers), *self._ucx.peers])
        return pb.Holdings(
            blocks=blocks,
            request_ids=list(ids)[:LISTED],
            exports=self._exporter.leased[:LISTED],
            transfers=len(importing) + self._exporter.transfers,
            buffers=self._ucx.held_buffers,
            peers=sorted(peers),
        )

    async def watch(self, message: pb.WatchRequest) -> AsyncIterator[pb.StepReport]:
        first = pb.StepReport()
        if self._replica is not None:
            with self._replica.steps.exclusive() as stepper:
                first = stepper.idle_report()
        try:
            async with contextlib.aclosing(self._reports.watch(first)) as reports:
                async for report in reports:
                    yield report
        finally:
            self.last_heard = time.monotonic()

    # -- the model ----------------------------------------------------------------------

    async def load_model(self, message: pb.LoadModelRequest) -> AsyncIterator[pb.LoadProgress]:
        async with self._loading:
            await self._gone()
            if self._replica is None:
                async with contextlib.aclosing(self._load(message)) as loading:
                    async for progress in loading:
                        yield progress
            else:
                self._check_same(self._replica, message)
        yield self._progress

    async def _gone(self) -> None:
        """What is left of the last model goes before another comes: it would take its offers and
        its socket along."""
        async with self._unloading:
            pass

    @staticmethod
    def _check_same(replica: "Replica", message: pb.LoadModelRequest) -> None:
        here = (str(replica.model_dir), replica.geometry.blocks)
        if here != (message.model_path, message.blocks_total):
            raise NotReady(
                f"model_path, blocks_total: {here[0]} with {here[1]} blocks is loaded; "
                "Reset with unload_weights first"
            )

    async def _load(self, message: pb.LoadModelRequest) -> AsyncGenerator[pb.LoadProgress]:
        loop = asyncio.get_running_loop()
        floor = loop.time() + message.floor_ms / 1e3
        moved: asyncio.Queue[pb.LoadProgress | None] = asyncio.Queue()

        def tell(progress: pb.LoadProgress) -> None:
            loop.call_soon_threadsafe(self._arrived, message, progress, moved)

        opening = asyncio.create_task(self._open(message, tell, deadline(LOAD_S)))
        opening.add_done_callback(lambda _: moved.put_nowait(None))
        try:
            while (progress := await moved.get()) is not None:
                self._progress = progress
                yield progress
            replica = await opening
            await asyncio.sleep(floor - loop.time())
            if not message.live:
                await self._install(replica)
        except BaseException:
            # It failed, or whoever asked has left and the model is not wanted any more.
            self._progress = pb.LoadProgress()
            opening.cancel()
            if not message.live:
                opening.add_done_callback(discard)
            await asyncio.wait([opening])
            await self._unload()
            await self._weights.server.withdraw()
            raise
        self._progress = dataclasses.replace(
            self._progress,
            digest=replica.digest,
            block_tokens=replica.geometry.block_tokens,
            blocks_total=replica.geometry.blocks,
        )

    def _arrived(
        self,
        message: pb.LoadModelRequest,
        progress: pb.LoadProgress,
        moved: "asyncio.Queue[pb.LoadProgress | None]",
    ) -> None:
        if message.live:
            self._early = progress
            if self._replica is None:
                return
            # The end of the model comes after its last layer.
            self._set_ready(self._replica, min(progress.layers_ready, progress.layers_total - 1))
            geometry = self._replica.geometry
            progress.block_tokens, progress.blocks_total = geometry.block_tokens, geometry.blocks
        moved.put_nowait(progress)

    @staticmethod
    def _set_ready(replica: "Replica", layers: int) -> None:
        with replica.steps.exclusive() as stepper:
            stepper.live.set_ready(layers)

    async def _open(
        self,
        message: pb.LoadModelRequest,
        tell: Callable[[pb.LoadProgress], None],
        deadline: float,
    ) -> "Replica":
        if not message.live:
            prepared = await self._weights.run(message, deadline, tell)
            return await self._open_replica(prepared, message)
        if not message.peers or self._options.device != "cpu":
            raise InvalidField("live: only with peers, and on a CPU")
        if message.shards:
            raise InvalidField("live: not with shards, since no layer is there before the last is")
        self._early = None

        async def arriving(prepared: Prepared) -> None:
            await self._install(await self._open_replica(prepared, message))
            if self._early is not None:
                tell(self._early)

        await self._weights.run(message, deadline, tell, arriving)
        self._set_ready(self._ready, self._ready.geometry.layers)
        return self._ready

    async def _open_replica(self, prepared: Prepared, message: pb.LoadModelRequest) -> "Replica":
        return await open_beside(prepared, message, self._options, self._publish, self._crashed)

    async def _install(self, replica: "Replica") -> None:
        server = ArenaServer(self._kv_socket, replica.kv, str(self._identity))
        try:
            await server.start()
        except BaseException:
            await asyncio.to_thread(replica.close, STOP_S)
            raise
        self._replica, self._arena_server = replica, server
        self._relays.watch(replica, asyncio.get_running_loop())

    def _publish(self, report: pb.StepReport) -> None:
        self._reports.publish(report)
        self._follower.moved()

    async def _unload(self) -> None:
        replica, server = self._replica, self._arena_server
        if replica is None or server is None:
            return
        self._replica, self._arena_server = None, None
        self._progress = pb.LoadProgress()
        await self._forget_everything(replica)
        await self._relays.close()
        await self._weights.give_up()
        await server.close()
        await asyncio.to_thread(replica.close, STOP_S)

    async def hold_weights(self, message: pb.HoldWeightsRequest) -> pb.HoldWeightsReply:
        async with self._loading:
            await self._gone()
            if self._replica is not None:
                raise NotReady("a model is loaded here; it gives its weights as it is")
            offer = await self._weights.hold(Path(message.model_path))
        return pb.HoldWeightsReply(model_digest=offer.digest, bytes_total=offer.size)

    async def serve_weights(self, message: pb.ServeWeightsRequest) -> pb.ServeWeightsReply:
        return await self._weights.server.run(message, deadline(ASK_S))

    # -- requests -----------------------------------------------------------------------

    @property
    def _ready(self) -> "Replica":
        if self._replica is None:
            raise NotReady("no model is loaded; LoadModel first")
        return self._replica

    async def prefill(self, message: pb.PrefillRequest) -> pb.PrefillReply:
        if message.request is None:
            raise InvalidField("request: missing")
        with self._ready.steps.exclusive() as stepper:
            stepper.prefill(message.request, message.hold)
        return pb.PrefillReply()

    async def export_kv(self, message: pb.ExportKvRequest) -> pb.ExportKvReply:
        return await self._exporter.run(
            self._ready, message, str(self._kv_socket), deadline(HANDOVER_S)
        )

    async def import_kv(self, message: pb.ImportKvRequest) -> AsyncIterator[pb.ImportKvReport]:
        pull = self._importer.run(self._ready, message, deadline(HANDOVER_S))
        async with contextlib.aclosing(pull) as reports:
            async for report in reports:
                yield report

    async def hold_requests(self, message: pb.HoldRequestsRequest) -> pb.HoldRequestsReply:
        with self._ready.steps.exclusive() as stepper:
            return pb.HoldRequestsReply(request_ids=stepper.hold(message.request_ids))

    async def release_kv(self, message: pb.ReleaseKvRequest) -> pb.ReleaseKvReply:
        replica = self._replica
        if replica is None:
            return pb.ReleaseKvReply()
        async with self._exporter.freeing(message.request_ids):
            with replica.steps.exclusive() as stepper:
                return pb.ReleaseKvReply(released=stepper.release(message.request_ids))

    async def resume_held(self, message: pb.ResumeHeldRequest) -> pb.ResumeHeldReply:
        replica = self._ready
        # No target may take up what goes on here.
        async with self._exporter.freeing(message.request_ids):
            with replica.steps.exclusive() as stepper:
                stepper.resume(message.request_ids)
        return pb.ResumeHeldReply()

    async def take_relay(self, message: pb.TakeRelayRequest) -> pb.TakeRelayReply:
        return await self._relays.take(self._ready, message, str(self._kv_socket))

    async def ack_relay(self, message: pb.AckRelayRequest) -> pb.AckRelayReply:
        return self._relays.acknowledge(self._ready, message)

    async def follow_live(self, message: pb.FollowLiveRequest) -> pb.FollowLiveReply:
        if self._options.device != "cpu":
            raise InvalidField("source_replica: a live pair runs on CPUs")
        return await self._follower.follow(self._ready, message, deadline(LOAD_S))

    async def cancel(self, message: pb.CancelRequest) -> pb.CancelReply:
        replica = self._replica
        if replica is None:
            return pb.CancelReply()
        cancelled = await self._importer.cancel(message.request_ids)
        async with self._exporter.freeing(message.request_ids):
            with replica.steps.exclusive() as stepper:
                cancelled += stepper.cancel(message.request_ids)
        return pb.CancelReply(cancelled=cancelled)

    async def reset(self, message: pb.ResetRequest) -> pb.ResetReply:
        if message.unload_weights:
            async with self._unloading:
                await self._unload()
                await self._weights.give_up()
        elif self._replica is not None:
            await self._forget_everything(self._replica)
        return pb.ResetReply()

    async def _forget_everything(self, replica: "Replica") -> None:
        await self._importer.cancel()
        await self._follower.stop()
        async with self._exporter.freeing():
            with replica.steps.exclusive() as stepper:
                stepper.reset()
