"""`blitzd up`: a model served on this machine, with everything it takes."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
import structlog
import uvloop

from blitzd.engine import catalogue
from blitzd.engine.device import devices_of, unsupported
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.layout import read_model_file
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import ReplicaOptions, Weights
from blitzd.engine.prepare import prepare
from blitzd.events import LogError, LogLocked
from blitzd.fsm import IllegalEvent, IllegalTransition
from blitzd.http.server import serve
from blitzd.node.config import NodeConfig
from blitzd.node.daemon import NodeDaemon
from blitzd.node.paths import default_state_dir

Count = Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1, lte=64))]
Spares = Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=0, lte=64))]
Port = Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=0, lte=65535))]
Positive = Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1))]


def up(
    *,
    model: str = catalogue.DEFAULT_MODEL,
    host: str = "127.0.0.1",
    port: Port = 11236,
    admin_port: Port = 11237,
    state_dir: Path | None = None,
    prefill: Count = 1,
    decode: Count = 1,
    spare: Spares = 1,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device: str = "cpu",
    weights: Weights = "map",
    same_node: Literal["map", "ucx"] = "map",
    kv_mib: Positive = 1024,
    threads: Positive = 1,
) -> int:
    """Serve a model with prefill and decode in processes of their own.

    Parameters
    ----------
    model
        A name of the catalogue (fetched if it is not here), or the path of a GGUF file or of
        a directory with config.json and safetensors.
    host
        Where the OpenAI API listens. The admin API never leaves this machine.
    port
        Of the OpenAI API.
    admin_port
        Of the admin API.
    state_dir
        Where the event log is kept: $STATE_DIRECTORY, /var/lib/blitzd if it is there, else
        $XDG_STATE_HOME/blitzd (~/.local/state/blitzd).
    prefill
        Replicas that compute prompts.
    decode
        Replicas that make the tokens after the first.
    spare
        Workers without a model, for when replicas are added (nothing adds them yet).
    dtype
        Of weights and KV; by default float32 on a CPU, bfloat16 on GPUs.
    device
        Where replicas run: cpu; cuda, in turns on every visible GPU; cuda:N; auto for cuda
        where it can be had, else cpu. The CUDA path has never been run on a GPU yet.
    weights
        map: replicas share the mapped file. copy: each has its own, on huge pages.
    same_node
        How KV moves between workers: a mapped arena, or UCX as between nodes.
    kv_mib
        KV cache of each replica.
    threads
        Compute threads of each worker.
    """
    _log_to_stderr()
    state_dir = state_dir or default_state_dir()
    try:
        if port and port == admin_port:
            raise ValueError(f"--port and --admin-port are both {port}; two ports are needed")
        entry = catalogue.CATALOGUE.get(model)
        if entry is not None and not catalogue.is_pulled(entry):
            print(f"fetching {entry.name} ({entry.bytes >> 20} MiB, {entry.licence})", flush=True)
            catalogue.pull(model)
        source = catalogue.resolve(model)
        devices = devices_of(device)
        dtype = dtype or ("float32" if devices == ("cpu",) else "bfloat16")
        print(f"model {source.name} as {dtype} on {', '.join(devices)}", flush=True)
        model_dir = prepare(source, dtype, catalogue.prepared_dir())
        _check_device(devices, weights, read_model_file(model_dir).config)
        config = NodeConfig(
            state_dir=state_dir,
            model_dir=model_dir,
            model_name=entry.name if entry else Path(model).stem,
            temperature=entry.temperature if entry else 1.0,
            prefill=prefill,
            decode=decode,
            spare=spare,
            host=host,
            port=port,
            admin_port=admin_port,
            same_node=same_node,
            kv_blocks=_kv_blocks(model_dir, kv_mib << 20, prefill + decode),
            devices=devices,
            weights=weights,
            worker_threads=threads,
        )
        daemon = NodeDaemon(config)
    except (ValueError, OSError, TimeoutError, catalogue.PullError) as error:
        return _refuse(str(error))
    except LogLocked as error:
        return _refuse(str(error))
    except (LogError, IllegalEvent, IllegalTransition) as error:
        return _refuse(f"{error}\nlook closer with: blitzd log verify {state_dir}")
    count = len(config.replicas())
    print(f"starting {count} workers; log in {state_dir / 'log'}", flush=True)
    try:
        uvloop.run(_run(daemon))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _refuse(f"port {port} or {admin_port} is taken; see --port and --admin-port")
        return _refuse(str(error))
    return 0


def _refuse(message: str) -> int:
    print(f"blitzd up: {message}", file=sys.stderr)
    return 1


def _log_to_stderr() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def _check_device(devices: tuple[str, ...], weights: Weights, config: ModelConfig) -> None:
    """What every worker would refuse is refused before any is started."""
    if devices != ("cpu",):
        ReplicaOptions(device="cuda", weights=weights)
        if reason := unsupported(config):
            raise ValueError(f"--device: {config.name} has {reason}")


def _kv_blocks(model_dir: Path, kv_bytes: int, replicas: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kv_bytes * replicas > memory:
        raise ValueError(
            f"--kv-mib: {kv_bytes >> 20} MiB for each of {replicas} replicas;"
            f" this machine has {memory >> 20} MiB"
        )
    config = read_model_file(model_dir).config
    block_bytes = KvGeometry.of(config, blocks=1).block_bytes
    blocks = kv_bytes // block_bytes
    if blocks < 2:
        raise ValueError(
            f"--kv-mib: {kv_bytes >> 20} MiB hold {blocks} KV blocks of {block_bytes} bytes;"
            " at least 2 are needed"
        )
    return blocks


async def _run(daemon: NodeDaemon) -> None:
    loop = asyncio.get_running_loop()
    stops: set[asyncio.Task[None]] = set()

    def stop(name: str) -> None:
        drain_s = 0.0 if stops else daemon.config.drain_s
        if not stops:
            running = len(daemon.core.state.requests)
            print(
                f"stopping: {running} requests may take {drain_s:.0f} s more;"
                " a second signal stops at once",
                flush=True,
            )
        stops.add(loop.create_task(daemon.stop(name, drain_s)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    await daemon.run(_serving)


@asynccontextmanager
async def _serving(daemon: NodeDaemon) -> AsyncIterator[None]:
    config = daemon.config
    async with serve(daemon, host=config.host, port=config.port, admin_port=config.admin_port):
        greeting = asyncio.create_task(_greet(daemon))
        yield
        greeting.cancel()


async def _greet(daemon: NodeDaemon) -> None:
    """Says what runs and what to type next, once it would work."""
    config = daemon.config
    while not daemon.health().ready:  # noqa: ASYNC110 - for people, ten times a second is prompt
        await asyncio.sleep(0.1)
    replicas = daemon.state()["replicas"]
    lines = [
        f"blitzd serves {config.model_name} on http://{config.host}:{config.port}",
        *(
            f"  {r['id']}  {r['role']:<8} {r['state']:<9} pid {r['pid'] or '-'}"
            + (f"  {r['blocks_total']} KV blocks" if r["blocks_total"] else "")
            for r in replicas
        ),
        f"log    {config.state_dir / 'log'}",
        f"admin  http://127.0.0.1:{config.admin_port}/admin/state",
        "",
        "Try it:",
        f"  curl -N http://{config.host}:{config.port}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model":"{config.model_name}","stream":true,"messages":'
        '[{"role":"user","content":"What is the capital of France?"}]}\'',
        "",
        f"Look back:  blitzd log verify {config.state_dir}",
        f"            blitzd replay {config.state_dir} --state",
        "",
        f"Ctrl-C stops it; what runs then has {config.drain_s:.0f} s to finish.",
    ]
    print("\n".join(lines), flush=True)
