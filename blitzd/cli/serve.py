"""`blitzd up` and `blitzd serve`: a model served on this machine, with everything it takes."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from cyclopts import Parameter

from blitzd.cli.launch import Greet, Refused, Say, launch
from blitzd.cli.options import Assignments, ConfigFile
from blitzd.cli.settings_layers import SettingsError, load
from blitzd.engine.options import Weights
from blitzd.http.server import Serving
from blitzd.node.daemon import NodeDaemon

log = structlog.get_logger()


def up(
    *,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    admin_port: int | None = None,
    state_dir: Path | None = None,
    prefill: int | None = None,
    decode: int | None = None,
    spare: int | None = None,
    autoscale: Annotated[bool | None, Parameter(negative="")] = None,
    preset: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device: str | None = None,
    weights: Weights | None = None,
    same_node: Literal["map", "ucx"] | None = None,
    kv_mib: int | None = None,
    threads: int | None = None,
    set: Assignments = (),
) -> int:
    """Serve a model with prefill and decode in processes of their own.

    The quick start: `blitzd serve` without a file, with options for what one changes first,
    and with words about what to do next.

    Parameters
    ----------
    model
        A name of the catalogue or hf:ORG/REPO[@REVISION] of the Hugging Face hub (fetched if
        it is not here), or the path of a GGUF file or of a directory with config.json and
        safetensors. Default: smollm2-135m.
    host
        Where the OpenAI API listens; 127.0.0.1 by default. The admin API never leaves this
        machine.
    port
        Of the OpenAI API; 11236 by default.
    admin_port
        Of the admin API; 11237 by default.
    state_dir
        Where the event log is kept: $STATE_DIRECTORY, /var/lib/blitzd if it is there, else
        $XDG_STATE_HOME/blitzd (~/.local/state/blitzd).
    prefill
        Replicas that compute prompts; 1 by default.
    decode
        Replicas that make the tokens after the first; 1 by default.
    spare
        Workers without a model, for when replicas are added; 1 by default.
    autoscale
        Give and take replicas by load, from all of these. Without it there are as many as
        were asked for, until `blitzd scale`.
    preset
        A baseline by the original's feature names, as in impl_sllm,cache_replace; see
        docs/baselines.md.
    dtype
        Of weights and KV; by default float32 on a CPU, bfloat16 on GPUs.
    device
        Where replicas run: cpu, the default; cuda, in turns on every visible GPU; cuda:N; auto
        for cuda where it can be had, else cpu. The CUDA path has never been run on a GPU yet.
    weights
        map, the default: replicas share the mapped file. copy: each has its own, on huge
        pages.
    same_node
        How KV moves between workers: a mapped arena (map, the default), or UCX as between nodes.
    kv_mib
        KV cache of each replica; 1024 by default.
    threads
        Compute threads of each worker; 1 by default.
    set
        section.key=value, for any setting of docs/config.md; may be given several times.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    given = {
        "model.name": ("--model", model),
        "http.host": ("--host", host),
        "http.port": ("--port", port),
        "admin.port": ("--admin-port", admin_port),
        "node.state_dir": ("--state-dir", state_dir and str(state_dir)),
        "replicas.prefill": ("--prefill", prefill),
        "replicas.decode": ("--decode", decode),
        "replicas.spare": ("--spare", spare),
        "policy.autoscale": ("--autoscale", autoscale and 1),
        "baseline.preset": ("--preset", preset),
        "model.dtype": ("--dtype", dtype),
        "engine.device": ("--device", device),
        "engine.weights": ("--weights", weights),
        "fabric.same_node": ("--same-node", same_node),
        "engine.kv_mib": ("--kv-mib", kv_mib),
        "engine.threads": ("--threads", threads),
    }
    options = {key: (name, value) for key, (name, value) in given.items() if value is not None}
    return _serve("up", None, set, options, _say, _greet)


def serve(*, config: ConfigFile = None, set: Assignments = ()) -> int:
    """The node daemon. Settings come from the file, $BLITZD_SECTION__KEY and --set, each over
    the one before.

    Parameters
    ----------
    config
        A TOML file; systemd/blitzd.toml is an annotated example.
    set
        section.key=value, for any setting of docs/config.md; may be given several times.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return _serve("serve", config, set, {}, log.info, _log_where)


def _serve(
    command: str,
    file: Path | None,
    assignments: tuple[str, ...],
    options: dict[str, tuple[str, Any]],
    say: Say,
    greet: Greet,
) -> int:
    try:
        loaded = load(file, assignments, options=options)
    except SettingsError as error:
        print(f"blitzd {command}: {error}", file=sys.stderr)
        return 2
    try:
        launch(loaded.settings, say, greet)
    except Refused as error:
        print(f"blitzd {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


async def _ready(daemon: NodeDaemon) -> None:
    while not daemon.health().ready:  # noqa: ASYNC110 - for people, ten times a second is prompt
        await asyncio.sleep(0.1)


async def _log_where(daemon: NodeDaemon, where: Serving) -> None:
    log.info("listening", host=where.host, port=where.port, admin_port=where.admin_port)
    await _ready(daemon)
    log.info("ready", model=daemon.config.model_name)


async def _greet(daemon: NodeDaemon, where: Serving) -> None:
    """Says what runs and what to type next, once it would work."""
    config = daemon.config
    await _ready(daemon)
    replicas = daemon.state()["replicas"]
    lines = [
        f"blitzd serves {config.model_name} on http://{where.host}:{where.port}",
        *(
            f"  {r['id']}  {r['role']:<8} {r['state']:<9} pid {r['pid'] or '-'}"
            + (f"  {r['blocks_total']} KV blocks" if r["blocks_total"] else "")
            for r in replicas
        ),
        f"log    {config.state_dir / 'log'}",
        f"admin  http://127.0.0.1:{where.admin_port}/admin/state",
        "",
        "Try it:",
        f"  curl -N http://{where.host}:{where.port}/v1/chat/completions \\",
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
