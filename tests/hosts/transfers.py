"""Workers on hosts of their own, and multicasts between them as the planner lays them out."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from blitzd.control import shards
from blitzd.control.multicast import Chain, plan
from blitzd.control.shards import Sharded
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


def wide_topology(hosts: Hosts, rate: float, scale_up_rate: float) -> Topology:
    """Each host a domain with a device at each of its links: `h0.1` is that at eth1 of host 0."""
    devices = {
        f"h{host}.{link}": Device(f"h{host}", "switch", round(rate), f"h{host}/eth{link}")
        for host in range(hosts.count)
        for link in range(hosts.links)
    }
    return Topology(devices, round(scale_up_rate))


def sharded(topology: Topology, source: str) -> Sharded:
    """From all devices of the host `source` to those of all others."""
    sources = [name for name, device in topology.devices.items() if device.domain == source]
    [one] = shards.plan(topology, sources, [n for n in topology.devices if n not in sources])
    return one


def chained(topology: Topology, source: str, targets: Sequence[str]) -> list[Chain]:
    return plan(topology, [source], targets)


def alone(source: str, targets: Sequence[str]) -> list[Chain]:
    """Repeated point to point: every target asks the source."""
    return [Chain(source, (target,)) for target in targets]


@contextlib.asynccontextmanager
async def workers(zygote: Zygote, hosts: Hosts, count: int) -> AsyncIterator[dict[str, Client]]:
    """The worker h0 on host 0 and so on; h0.0, h0.1 and so on where hosts have several links."""
    clients: dict[str, Client] = {}
    try:
        for host, link in itertools.product(range(count), range(hosts.links)):
            name = f"h{host}.{link}" if hosts.links > 1 else f"h{host}"
            process = zygote.start(
                name,
                namespace=hosts.name(host),
                network_device=f"eth{link}" if hosts.links > 1 else "",
                orphan_timeout_s=2 * LIMIT_S,
            )
            clients[name] = await Client.connect(name, zygote.epochs[name], process)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
            client.process.kill()
            await client.process.wait()


def named(clients: Sequence[Client], transport: pb.Transport) -> list[pb.WeightPeer]:
    return [
        pb.WeightPeer(
            replica_id=c.replica,
            epoch=c.epoch,
            endpoint=str(c.process.socket),
            transport=transport,
        )
        for c in clients
    ]


async def receive(
    client: Client,
    model: Path,
    upstream: Sequence[Client],
    takers: Sequence[Client] = (),
    chunk: int = 0,
) -> pb.LoadProgress:
    call = pb.LoadModelRequest(
        model_path=str(model),
        blocks_total=BLOCKS,
        peers=named(upstream, pb.Transport.UCX),
        shards=named(takers, pb.Transport.MAP),
        chunk_bytes=chunk,
    )
    async with asyncio.timeout(LIMIT_S):
        progress = [step async for step in client.stub.load_model(call)]
    assert progress[-1].digest, "the load ended early"
    return progress[-1]


def begin(
    clients: dict[str, Client], model: Path, chains: Sequence[Chain], chunk: int = 0
) -> dict[str, "asyncio.Task[pb.LoadProgress]"]:
    """Tells all targets at once, each with those upstream of it, nearest first."""
    loads = {}
    for chain in chains:
        upstream = [clients[chain.source]]
        for target in chain.targets:
            load = receive(clients[target], model, upstream, chunk=chunk)
            loads[target] = asyncio.create_task(load)
            upstream = [clients[target], *upstream]
    return loads


def begin_shards(
    clients: dict[str, Client], model: Path, plan: Sharded, chunk: int = 0
) -> dict[str, "asyncio.Task[pb.LoadProgress]"]:
    loads = {}
    upstreams = [[clients[chain.source]] for chain in plan.chains]
    for place in range(len(plan.beside)):
        takers = [clients[chain.targets[place]] for chain in plan.chains]
        for taker, upstream in zip(takers, upstreams, strict=True):
            load = receive(taker, model, upstream, takers, chunk)
            loads[taker.replica] = asyncio.create_task(load)
        upstreams = [[t, *upstream] for t, upstream in zip(takers, upstreams, strict=True)]
    return loads


async def multicast(
    clients: dict[str, Client],
    model: Path,
    plan: Sequence[Chain] | Sharded,
    chunk: int = 0,
) -> dict[str, float]:
    """Seconds until each target was whole and checked."""
    began = time.monotonic()
    if isinstance(plan, Sharded):
        loads = begin_shards(clients, model, plan, chunk)
    else:
        loads = begin(clients, model, plan, chunk)
    took: dict[str, float] = {}

    async def timed(target: str, load: "asyncio.Task[pb.LoadProgress]") -> None:
        await load
        took[target] = time.monotonic() - began

    await asyncio.gather(*(timed(t, load) for t, load in loads.items()))
    return took


def said(zygote: Zygote, client: Client, event: str) -> list[dict[str, Any]]:
    """Lines of the worker's log."""
    lines = (zygote.directory / f"{client.replica}.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    identity = f"{client.replica}/{client.epoch}"
    return [r for r in records if r["event"] == event and r["worker"] == identity]
