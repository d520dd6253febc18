"""From settings to a daemon that serves: the way that `blitzd up` and `blitzd serve` share."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import uvloop

from blitzd.cli.settings import EngineSettings, ModelSettings, NodeSettings, Settings
from blitzd.engine import catalogue
from blitzd.engine.device import devices_of, unsupported
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.layout import read_model_file
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepare import prepare
from blitzd.events import LogError, LogLocked
from blitzd.fabric import Tls
from blitzd.fsm import IllegalEvent, IllegalTransition
from blitzd.http.limits import Limits
from blitzd.http.server import Serving, serve
from blitzd.node.agent import Agent
from blitzd.node.config import NodeConfig
from blitzd.node.daemon import NodeDaemon
from blitzd.node.notify import Manager
from blitzd.node.paths import default_state_dir, publish_admin_socket
from blitzd.node.worker_units import unit_dir

Say = Callable[[str], None]
Greet = Callable[[NodeDaemon, Serving], Coroutine[Any, Any, None]]
"""Runs beside the daemon from when its ports are open."""

log = structlog.get_logger()


class Refused(Exception):
    """The daemon does not start, for a reason that is the operator's to mend."""


def launch(settings: Settings, say: Say, greet: Greet) -> None:
    """Serves until it is told to stop. Raises Refused."""
    manager = Manager.of(os.environ)

    def say_both(text: str) -> None:
        say(text)
        manager.tell(f"STATUS={text}")

    state_dir = _state_dir(settings)
    try:
        config = node_config(settings, state_dir, say_both)
        daemon = Agent(config) if settings.node.role == "agent" else NodeDaemon(config)
    except (ValueError, OSError, TimeoutError, catalogue.PullError, LogLocked) as error:
        raise Refused(str(error)) from error
    except (LogError, IllegalEvent, IllegalTransition) as error:
        raise Refused(f"{error}\nlook closer with: blitzd log verify {state_dir}") from error
    if isinstance(daemon, Agent):
        _run_agent(daemon, manager, say_both)
        return
    say_both(f"starting {len(config.replicas())} workers; log in {state_dir / 'log'}")
    try:
        uvloop.run(_run(daemon, settings, manager, say, greet))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            ports = f"port {settings.http.port} or {settings.admin.port}"
            raise Refused(f"{ports} is taken; see http.port and admin.port") from error
        raise Refused(str(error)) from error


def _state_dir(settings: Settings) -> Path:
    given = settings.node.state_dir
    return Path(given).expanduser() if given else default_state_dir()


def node_config(settings: Settings, state_dir: Path, say: Say) -> NodeConfig:
    """With the model fetched and prepared, if it was not. Raises ValueError, OSError,
    TimeoutError, PullError."""
    engine, limits = settings.engine, settings.limits
    if settings.node.spawn == "systemd":
        unit_dir()  # a start outside of a unit is refused, with what is missing
    devices = devices_of(engine.device)
    model_dir = _prepare(settings.model, devices, say)
    _check_device(devices, engine, read_model_file(model_dir).config)
    entry = catalogue.CATALOGUE.get(settings.model.name)
    counts = settings.replicas
    loaded = counts.prefill + counts.decode + counts.spare * settings.policy.autoscale
    return NodeConfig(
        state_dir=state_dir,
        model_dir=model_dir,
        model_name=catalogue.served_name(settings.model.name),
        temperature=entry.temperature if entry else 1.0,
        prefill=counts.prefill,
        decode=counts.decode,
        spare=counts.spare,
        node=settings.node.name,
        address=settings.node.address,
        node_port=settings.node.port,
        controller=settings.node.controller,
        tls=tls_of(settings.node),
        lease_s=settings.node.lease_s,
        spawn=settings.node.spawn,
        same_node=settings.fabric.same_node,
        network_devices=settings.fabric.network_devices,
        kv_blocks=_kv_blocks(model_dir, engine.kv_mib, loaded),
        devices=devices,
        weights=engine.weights,
        worker_threads=engine.threads,
        max_batch_tokens=engine.max_batch_tokens,
        max_batch_size=engine.max_batch_size,
        pace_layer_ms=engine.pace_layer_ms,
        live_policy=engine.live_policy,
        orphan_timeout_s=limits.orphan_timeout_s,
        start_deadline_s=limits.start_deadline_s,
        hang_deadline_s=limits.hang_deadline_s,
        step_deadline_s=limits.step_deadline_s,
        drain_s=limits.drain_s,
        topology=settings.topology.described(),
        policy=settings.policy,
    )


def tls_of(node: NodeSettings) -> Tls:
    """Raises OSError, ValueError."""
    files = (node.tls_cert, node.tls_key, node.tls_ca)
    tls = Tls(*(str(Path(file).expanduser().absolute()) if file else "" for file in files))
    try:
        tls.check()
    except OSError as error:
        raise ValueError(f"node.tls_cert, node.tls_key, node.tls_ca: {error}") from error
    return tls


def _prepare(model: ModelSettings, devices: tuple[str, ...], say: Say) -> Path:
    try:
        source = catalogue.resolve(model.name)
    except FileNotFoundError:
        if not catalogue.can_pull(model.name):
            raise
        say(f"fetching {catalogue.describe(model.name)}")
        source = catalogue.pull(model.name)
    dtype = model.dtype
    if dtype == "auto":
        dtype = "float32" if devices == ("cpu",) else "bfloat16"
    say(f"model {catalogue.served_name(model.name)} as {dtype} on {', '.join(devices)}")
    return prepare(source, dtype, catalogue.prepared_dir())


def _check_device(devices: tuple[str, ...], engine: EngineSettings, config: ModelConfig) -> None:
    """What every worker would refuse is refused before any is started."""
    if devices != ("cpu",):
        ReplicaOptions(device="cuda", weights=engine.weights)
        if reason := unsupported(config):
            raise ValueError(f"engine.device: {config.name} has {reason}")


def _kv_blocks(model_dir: Path, kv_mib: int, replicas: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kv_bytes = kv_mib << 20
    if kv_bytes * replicas > memory:
        raise ValueError(
            f"engine.kv_mib: {kv_mib} for each of {replicas} replicas;"
            f" this machine has {memory >> 20} MiB"
        )
    config = read_model_file(model_dir).config
    block_bytes = KvGeometry.of(config, blocks=1).block_bytes
    blocks = kv_bytes // block_bytes
    if blocks < 2:
        raise ValueError(
            f"engine.kv_mib: {kv_mib} MiB hold {blocks} KV blocks of {block_bytes} bytes;"
            " at least 2 are needed"
        )
    return blocks


async def _run(
    daemon: NodeDaemon, settings: Settings, manager: Manager, say: Say, greet: Greet
) -> None:
    loop = asyncio.get_running_loop()
    stops: set[asyncio.Task[None]] = set()

    def stop(name: str) -> None:
        drain_s = 0.0 if stops else daemon.config.drain_s
        if not stops:
            manager.tell("STOPPING=1")
            running = len(daemon.core.state.requests)
            say(
                f"stopping: {running} requests may take {drain_s:g} s more;"
                " a second signal stops at once"
            )
        stops.add(loop.create_task(daemon.stop(name, drain_s)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)

    @asynccontextmanager
    async def serving(daemon: NodeDaemon) -> AsyncIterator[None]:
        async with _listening(daemon, settings) as where:
            # Not when a replica serves: docs/systemd.md says why.
            manager.tell("READY=1")
            beside = (manager.attend(daemon), greet(daemon, where))
            tasks = [loop.create_task(_logged(work)) for work in beside]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    await daemon.run(serving)


def _run_agent(agent: Agent, manager: Manager, say: Say) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            manager.tell("STOPPING=1")
            say("stopping: its workers end")
            agent.stop(name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number.name)
        attending = loop.create_task(_logged(manager.attend_agent(agent)))
        try:
            await agent.run(ready=lambda: manager.tell("READY=1"))
        finally:
            attending.cancel()

    config = agent.config
    say(f"agent of node {config.node} for the controller at {config.controller}")
    uvloop.run(run())


def _listening(daemon: NodeDaemon, settings: Settings) -> AbstractAsyncContextManager[Serving]:
    http, admin = settings.http, settings.admin
    limits = Limits(
        body_bytes=http.body_bytes,
        body_s=http.body_s,
        idle_s=http.idle_s,
        send_s=http.send_s,
        stall_s=http.stall_s,
    )
    return serve(
        daemon,
        host=http.host,
        port=http.port,
        admin_port=admin.port,
        admin_socket=publish_admin_socket(daemon.config.state_dir, admin.socket),
        limits=limits,
    )


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("the daemon goes on without a task of its own")
