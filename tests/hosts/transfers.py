"""Workers on hosts of their own, and multicasts between them as the planner lays them out."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from blitzd.control.multicast import Chain, plan
from blitzd.control.topology import Device, Topology
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.workers import Client, Zygote
from tests.hosts.netns import Hosts

BLOCKS = 4
LIMIT_S = 240.0


def topology_of(hosts: Hosts, rate: float) -> Topology:
    """Each host a domain of one device at the switch, `rate` bytes a second each way."""
    devices = {f"h{i}": Device(f"h{i}", "switch", round(rate)) for i in range(hosts.count)}
    return Topology(devices, scale_up_rate=10**12)


def chained(topology: Topology, source: str, targets: Sequence[str]) -> list[Chain]:
    return plan(topology, [source], targets)


def alone(source: str, targets: Sequence[str]) -> list[Chain]:
    """Repeated point to point: every target asks the source."""
    return [Chain(source, (target,)) for target in targets]


@contextlib.asynccontextmanager
async def workers(zygote: Zygote, hosts: Hosts, count: int) -> AsyncIterator[dict[str, Client]]:
    """The worker h0 on host 0 and so on."""
    clients: dict[str, Client] = {}
    try:
        for host in range(count):
            name = f"h{host}"
            process = zygote.start(name, namespace=hosts.name(host), orphan_timeout_s=2 * LIMIT_S)
            clients[name] = await Client.connect(name, zygote.epochs[name], process)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
            client.process.kill()
            await client.process.wait()


async def receive(client: Client, model: Path, upstream: Sequence[Client]) -> pb.LoadProgress:
    peers = [
        pb.WeightPeer(replica_id=p.replica, epoch=p.epoch, endpoint=str(p.process.socket))
        for p in upstream
    ]
    call = pb.LoadModelRequest(model_path=str(model), blocks_total=BLOCKS, peers=peers)
    async with asyncio.timeout(LIMIT_S):
        progress = [step async for step in client.stub.load_model(call)]
    assert progress[-1].digest, "the load ended early"
    return progress[-1]


def begin(
    clients: dict[str, Client], model: Path, chains: Sequence[Chain]
) -> dict[str, "asyncio.Task[pb.LoadProgress]"]:
    """Tells all targets at once, each with those upstream of it, nearest first."""
    loads = {}
    for chain in chains:
        upstream = [clients[chain.source]]
        for target in chain.targets:
            loads[target] = asyncio.create_task(receive(clients[target], model, upstream))
            upstream = [clients[target], *upstream]
    return loads


async def multicast(
    clients: dict[str, Client], model: Path, chains: Sequence[Chain]
) -> dict[str, float]:
    """Seconds until each target was whole and checked."""
    began = time.monotonic()
    took: dict[str, float] = {}

    async def timed(target: str, load: "asyncio.Task[pb.LoadProgress]") -> None:
        await load
        took[target] = time.monotonic() - began

    await asyncio.gather(*(timed(t, load) for t, load in begin(clients, model, chains).items()))
    return took


def said(zygote: Zygote, client: Client, event: str) -> list[dict[str, Any]]:
    """Lines of the worker's log."""
    lines = (zygote.directory / f"{client.replica}.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    identity = f"{client.replica}/{client.epoch}"
    return [r for r in records if r["event"] == event and r["worker"] == identity]
