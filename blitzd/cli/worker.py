"""`blitzd worker`: one engine worker. The daemon starts it; a person can, too."""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from blitzd.engine.device import claim_device
from blitzd.engine.options import LivePolicy, ReplicaOptions, Weights
from blitzd.engine.worker import WorkerOptions, run
from blitzd.fabric import Identity, Tls

Positive = validators.Number(gte=1)


def worker(
    *,
    id: str,
    epoch: Annotated[int, Parameter(validator=validators.Number(gte=0))],
    socket: Path,
    device: str = "cpu",
    weights: Weights = "map",
    threads: Annotated[int, Parameter(validator=Positive)] = 1,
    orphan_timeout: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 20.0,
    pace_layer_ms: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 0.0,
    live_policy: LivePolicy = "ilp_free",
    max_batch_tokens: Annotated[int, Parameter(validator=Positive)] = 512,
    max_batch_size: Annotated[int, Parameter(validator=Positive)] = 64,
    host: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
    network_device: str = "",
    model: Path | None = None,
    verify_kv: Annotated[bool, Parameter(env_var="BLITZD_VERIFY_KV")] = False,
) -> int:
    """Serve one replica's engine over gRPC until SIGTERM.

    Parameters
    ----------
    id
        Replica, such as r0.
    epoch
        Of this start of the replica; part of its name to everyone.
    socket
        Unix socket to serve on.
    device
        Where the model runs: cpu; cuda or cuda:N with FlashInfer (never run on a GPU yet); auto
        for cuda where it can be had, else cpu.
    weights
        Mapped and shared with other replicas on the node, or a copy of one's own.
    threads
        Compute threads.
    orphan_timeout
        Seconds without a daemon watching or asking for health after which the worker ends.
    pace_layer_ms
        Floor under a layer's time, for experiments on few cores; 0 for none.
    live_policy
        Which layer of which request runs next while weights arrive.
    max_batch_tokens
        Tokens of one step; longer prompts are computed in chunks.
    max_batch_size
        Requests of one step.
    host
        Of this node: listen there for other nodes, on any free port, over TCP with mutual TLS.
    tls_cert
        This node's certificate, PEM. Without one what goes between nodes can be read and forged.
    tls_key
        Its key.
    tls_ca
        The authority that signed the certificates of all nodes.
    network_device
        That weights and KV of other nodes pass, such as eth1 or mlx5_0:1; by default any.
    model
        A prepared directory to map and warm up while nothing else is to be done, since a load of
        it will probably follow.
    verify_kv
        Compare checksums of imported KV with its source's.
    """
    try:
        options = WorkerOptions(
            identity=Identity.parse(f"{id}/{epoch}"),
            socket=socket.absolute(),
            orphan_timeout_s=orphan_timeout,
            host=host,
            tls=Tls(tls_cert, tls_key, tls_ca),
            network_device=network_device,
            verify_kv=verify_kv,
            model=model and model.absolute(),
            replica=ReplicaOptions(
                device=claim_device(device),
                weights=weights,
                threads=threads,
                max_batch_tokens=max_batch_tokens,
                max_batch_size=max_batch_size,
                pace_layer_ms=pace_layer_ms,
                live_policy=live_policy,
            ),
        )
    except ValueError as error:
        print(f"blitzd worker: {error}", file=sys.stderr)
        return 2
    try:
        status = run(options)
    except OSError as error:
        print(f"blitzd worker: {options.socket}: {error}", file=sys.stderr)
        return 1
    # Everything is closed by now; taking torch apart, module by module, would only keep the
    # memory for longer.
    sys.stderr.flush()
    os._exit(status)
