"""What a KV hand-over costs: bytes, seconds on each link, and against the prefill's time."""

from collections.abc import Sequence
from dataclasses import dataclass

from blitzd.sim.hardware import ETHERNET_100G, Gpu, Link
from blitzd.sim.models import MODELS, Model
from blitzd.sim.report import Table
from blitzd.sim.roofline import Roofline

HELP = """\
bytes_per_token = 2 x layers x KV heads x head dim x bytes; seconds = latency + bytes / rate.
prefill_s is the roofline model's for one prompt alone (55 % of dense peak, two ring
all-reduces a layer). Links: NVLink and one network card as the GPU has them, eight cards
together, and 100 Gb Ethernet. On H100 the ethernet share comes out at a third to two
thirds, one card at 9 to 15 %, eight cards or NVLink at 1 to 2 %: the same as in the lecture
whose tables these are. OPT-66B at 10 requests/s of 512 tokens needs 97 Gb/s; the DistServe
paper prints 90 because it reads the 1.125 GiB as 1.125 GB.
"""


def prefill_s(model: Model, gpu: Gpu, tp: int, tokens: int) -> float:
    roofline = Roofline(model, gpu, tp)
    return roofline.linear_s(tokens) + roofline.attention_prefill_s(tokens)


def links_of(gpu: Gpu) -> list[Link]:
    nic = gpu.nic
    name = f"nic-{gpu.nic_gb_s * 8:g}g"
    return [
        gpu.intra_node,
        Link(name, nic.bytes_per_s, nic.latency_s),
        Link(f"8x-{name}", 8 * nic.bytes_per_s, nic.latency_s),
        ETHERNET_100G,
    ]


def smallest_tp(model: Model, gpu: Gpu) -> int:
    """The fewest GPUs of one node, a power of two, that hold the weights and some KV."""
    for tp in (1, 2, 4):
        if Roofline(model, gpu, tp).kv_capacity_tokens() > 0:
            return tp
    return 8


@dataclass(frozen=True, slots=True)
class KvAccount:
    report: dict[str, object]
    tables: list[Table]


def account(
    model: Model, gpu: Gpu, tp: int, tokens: int, rate: float, extra: Sequence[Link] = ()
) -> KvAccount:
    """The transfer of one request's KV, in bytes and seconds, and what `rate` requests/s of
    it need of the network."""
    size = tokens * model.kv_bytes_per_token
    prefill = prefill_s(model, gpu, tp, tokens)
    links = Table(
        f"One hand-over of {size / 1e6:.1f} MB against {prefill * 1e3:.1f} ms of prefill",
        ("name", "seconds", "share_of_prefill", "requests_per_s"),
        [
            (link.name, link.seconds(size), link.seconds(size) / prefill, link.bytes_per_s / size)
            for link in (*links_of(gpu), *extra)
        ],
    )
    report: dict[str, object] = {
        "model": model.name,
        "gpu": gpu.name,
        "tp": tp,
        "tokens": tokens,
        "bytes_per_token": model.kv_bytes_per_token,
        "kv_bytes": size,
        "prefill_s": prefill,
        "rate": rate,
        "gbit_per_s": gbit_per_s(model, tokens, rate),
        "links": links.as_dicts(),
    }
    return KvAccount(report, [demand_table([(model, tokens, rate)]), links])


def gbit_per_s(model: Model, tokens: int, requests_per_s: float) -> float:
    """Network rate that a stream of requests needs, in Gb/s (1e9 bits)."""
    return tokens * model.kv_bytes_per_token * requests_per_s * 8 / 1e9


def transfer_table(cases: Sequence[tuple[Model, int, int]], gpu: Gpu) -> Table:
    """One row a case (model, tp, tokens): size, prefill, and each link's time and share."""
    rows = []
    for model, tp, tokens in cases:
        size = tokens * model.kv_bytes_per_token
        prefill = prefill_s(model, gpu, tp, tokens)
        cells: list[str | int | float] = [model.name, tp, tokens, size / 1e6, prefill * 1e3]
        for link in links_of(gpu):
            cells += [link.seconds(size) * 1e3, 100 * link.seconds(size) / prefill]
        rows.append(tuple(cells))
    names = [f"{link.name} {unit}" for link in links_of(gpu) for unit in ("ms", "%")]
    columns = ("model", "tp", "tokens", "KV MB", "prefill ms", *names)
    return Table(f"KV transfer against prefill, {gpu.name}", columns, rows)


def demand_table(cases: Sequence[tuple[Model, int, float]]) -> Table:
    """One row a case (model, tokens, requests/s): what the network must carry."""
    rows = [
        (
            model.name,
            model.kv_bytes_per_token / 1024,
            tokens,
            tokens * model.kv_bytes_per_token / 2**30,
            rate,
            gbit_per_s(model, tokens, rate),
        )
        for model, tokens, rate in cases
    ]
    columns = ("model", "KiB per token", "tokens", "KV GiB", "requests/s", "Gb/s needed")
    return Table("KV traffic", columns, rows)


def default_tables(gpu: Gpu) -> list[Table]:
    """The placement document's accounts."""
    small, large, opt = (MODELS[n] for n in ("llama-3.1-8b", "llama-3.1-70b", "opt-66b"))
    return [
        demand_table([(opt, 512, 10), (large, 512, 10), (large, 1000, 30)]),
        transfer_table(
            [(small, 1, 1000), (small, 1, 8000), (large, 8, 1000), (large, 8, 8000)], gpu
        ),
    ]
