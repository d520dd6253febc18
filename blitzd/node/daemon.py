"""The node daemon: log, core, driver and workers put together, and its public face."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from random import SystemRandom
from typing import Any

import anyio.to_thread

import blitzd
from blitzd.control.agents import awaited
from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.engine.kv_geometry import BLOCK_TOKENS
from blitzd.engine.layout import read_model_file
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.tokenizer import Tokenizer
from blitzd.events import Identity, LogReader, LogWriter, types as ev
from blitzd.events.json_form import record_json
from blitzd.fsm import ReplicaState
from blitzd.fsm.standing import plan_json
from blitzd.node.config import NodeConfig
from blitzd.node.driver import Driver
from blitzd.node.face import (
    CommandFailed,
    GenerateRequest,
    Generation,
    Health,
    ModelCard,
    Observations,
    OperatorCommand,
)
from blitzd.node.hub import Hub
from blitzd.node.journal import SEGMENT_BYTES, FileJournal
from blitzd.node.observe import new_observations
from blitzd.node.operator import input_of
from blitzd.node.paths import runtime_dir
from blitzd.node.restore import restore
from blitzd.node.workers import WorkerPool

STALLED_S = 2.0
"""A driver that has not turned for so long is not alive; it ticks twice a second at least."""


ADOPTED = frozenset(
    {
        ReplicaState.PREFILL,
        ReplicaState.OLD_PREFILL,
        ReplicaState.REFACTORY_PREFILL,
        ReplicaState.DECODE,
        ReplicaState.COLOCATED,
        ReplicaState.SHUTTING_NULL,
    }
)


STATUS_OF_REFUSAL = {"invalid": 400, "unknown_replica": 404, "conflict": 409}


class SystemClock:
    def mono_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()


class NodeDaemon:
    """One node, from its log to its workers. Implements `face.NodeFace`."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._model: ModelConfig = read_model_file(config.model_dir).config
        try:
            self._tokenizer = Tokenizer.from_dir(config.model_dir)
        except (ValueError, OSError, LookupError, TypeError) as error:
            raise ValueError(
                f"{config.model_dir} is damaged ({error}); remove it, and it is prepared anew"
            ) from error
        self._created = int(time.time())
        self._observations = new_observations()
        config.state_dir.mkdir(parents=True, exist_ok=True)
        self._writer = LogWriter.open(
            config.state_dir / "log",
            Identity(blitzd.__version__, self._model.digest, config.node),
            segment_bytes=SEGMENT_BYTES,
        )
        self._clock = SystemClock()
        self.core = Core(restore(config.state_dir))
        self.driver = Driver(
            self.core,
            FileJournal(self._writer, config.state_dir / "log"),
            self._clock,
            self._observations,
            draw_seed=lambda: SystemRandom().getrandbits(32),
            first_request_id=(self._writer.boot_epoch << 32) + 1,
        )
        self.hub = Hub(config, self._model.digest, self.driver.post) if config.address else None
        self.pool = WorkerPool(config, runtime_dir(config.state_dir), self.driver, self.hub)

    async def run(self, serve: Callable[["NodeDaemon"], AbstractAsyncContextManager[None]]) -> None:
        """Serves until it is told to stop and everything accepted has ended. `serve` opens
        the HTTP routes; they stay open to the last response."""
        try:
            boot = await self._boot()
            async with serve(self), self._joinable():
                await self.driver.run(self.pool, boot)
                await self.pool.close()
            with contextlib.suppress(OSError):  # something else is in it
                runtime_dir(self.config.state_dir).rmdir()
        finally:
            await anyio.to_thread.run_sync(self._writer.close)

    @contextlib.asynccontextmanager
    async def _joinable(self) -> AsyncGenerator[None]:
        """Other nodes can join while it is entered, if there are to be any."""
        state = self.core.state
        nodes = {a.node: a.epoch for a in state.agents.values() if a.phase != "lost"}
        if self.hub is None:
            for node, epoch in nodes.items():
                await self.driver.post(ev.AgentLost(node, epoch, "node.address is empty now"))
            yield
            return
        assert self.pool.afar is not None
        for node in nodes:
            expected = [(r.id, r.epoch) for r in awaited(state) if r.node == node]
            self.pool.afar.expect(node, expected)
        await self.hub.start(nodes)
        try:
            yield
        finally:
            await self.hub.close()

    async def _boot(self) -> ev.Booted:
        state = self.core.state
        ours = [r.id for r in state.replicas.values() if r.pid and r.node not in state.agents]
        adopted = await asyncio.gather(*map(self._adopt, ours))
        return ev.Booted(
            self._writer.boot_epoch,
            blitzd.__version__,
            self.config.node,
            self.config.replicas(),
            self.config.policy.pairs(),
            CORE_VERSION,
            tuple(worker for worker in adopted if worker is not None),
            self.config.topology,
        )

    async def _adopt(self, replica_id: str) -> tuple[str, int, int] | None:
        """Keeps a worker of the last boot that was not in the middle of something."""
        replica = self.core.state.replicas[replica_id]
        digest = "none that is wanted"
        if replica.state is ReplicaState.INACTIVE:
            digest = ""
        elif replica.state in ADOPTED and replica.digest == self._model.digest:
            digest = self._model.digest
        if await self.pool.adopt(replica.id, replica.epoch, replica.pid, digest):
            return replica.id, replica.epoch, replica.pid
        return None

    async def stop(self, reason: str, drain_s: float) -> None:
        """Begins the drain. A second call may bring the deadline forward."""
        deadline_ns = self._clock.mono_ns() + int(drain_s * 1e9)
        await self.driver.post(ev.StopRequested(reason, deadline_ns))

    # The face.

    @property
    def models(self) -> list[ModelCard]:
        return [
            ModelCard(
                name=self.config.model_name,
                created=self._created,
                # A request has to fit the KV cache of every replica it passes.
                context_tokens=min(
                    self._model.context_tokens, self.config.kv_blocks * BLOCK_TOKENS
                ),
                vocab_tokens=self._model.vocab,
                digest=self._model.digest,
                licence=self._model.licence,
                temperature=self.config.temperature,
            )
        ]

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.driver.generate(request)

    def health(self) -> Health:
        state = self.core.state
        stalled_ns = self._clock.mono_ns() - self.driver.last_turn_ns
        reasons = [f"no {role} replica is ready" for role in state.unserved_roles()]
        reasons += [
            f"{r.id}: {r.trouble}" for r in state.replicas.values() if r.trouble and reasons
        ]
        if self.driver.read_only:
            reasons.append(f"the event log takes no records: {self.driver.read_only}")
        draining = state.node.phase == "draining"
        if draining:
            reasons.append("shutting down")
        return Health(
            live=stalled_ns < STALLED_S * 1e9,
            ready=not reasons,
            draining=draining,
            reasons=tuple(reasons),
        )

    def state(self) -> dict[str, Any]:
        # With the clock that deadlines are told by.
        state = self.core.state
        return state.to_json() | {"plan": plan_json(state), "now_ns": self._clock.mono_ns()}

    async def command(self, command: OperatorCommand) -> list[dict[str, Any]]:
        records = await self.driver.command(input_of(command, self._clock.mono_ns()))
        for record in records:
            refused = record.payload
            if isinstance(refused, ev.CommandRefused):
                about = f"{refused.command} {refused.replica}".rstrip()
                raise CommandFailed(
                    f"{about}: {refused.reason}",
                    status=STATUS_OF_REFUSAL[refused.code],
                    code=refused.code,
                    param=refused.field or None,
                )
        return [record_json(record) for record in records[1:]]

    def policy(self) -> dict[str, dict[str, int]]:
        now = dict(self.core.policy.pairs())
        bounds = Policy.bounds().items()
        return {name: {"value": now[name], "min": low, "max": high} for name, (low, high) in bounds}

    async def events(
        self, since: int, limit: int, follow: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        reader = LogReader(self.config.state_dir)
        with reader.cursor(max(since + 1, reader.first_seq)) as cursor:
            while True:
                turned = self.driver.turned
                batch = await anyio.to_thread.run_sync(cursor.read)
                for record in batch:
                    yield record_json(record)
                    limit -= 1
                    if not limit:
                        return
                if not batch:
                    if not follow:
                        return
                    await turned.wait()

    def observations(self) -> Observations:
        return self._observations
