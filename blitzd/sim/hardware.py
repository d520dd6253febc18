"""Accelerators and links, from their makers' data sheets (dense 16-bit, per direction)."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from blitzd.sim.errors import InputError


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of n bytes takes latency_s + n / bytes_per_s."""

    name: str
    bytes_per_s: float
    latency_s: float

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator. A file given as `--gpu` is this, as JSON."""

    name: str
    tflops: float
    """Dense bf16 peak, TFLOP/s."""
    memory_gb: float
    """Bytes / 1e9."""
    memory_gb_s: float
    """HBM bandwidth, GB/s."""
    nvlink_gb_s: float
    """To the other GPUs of the node, GB/s per direction; PCIe where there is no NVLink."""
    nic_gb_s: float
    """The GPU's share of its node's network cards, GB/s."""

    @property
    def intra_node(self) -> Link:
        return Link("nvlink", self.nvlink_gb_s * 1e9, 3e-6)

    @property
    def nic(self) -> Link:
        return Link("nic", self.nic_gb_s * 1e9, 5e-6)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989, 80, 3350, 450, 50),
        Gpu("h200", 989, 141, 4800, 450, 50),
        Gpu("a100", 312, 80, 2039, 300, 25),
        Gpu("a800", 312, 80, 2039, 200, 12.5),
        Gpu("rtx4090", 165, 24, 1008, 25, 12.5),
    )
}

ETHERNET_100G = Link("ethernet-100g", 12.5e9, 20e-6)


def find_gpu(name: str) -> Gpu:
    """A built-in accelerator by name, or that of a JSON file. Raises InputError."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    path = Path(name)
    if not path.is_file():
        raise InputError(f"gpu: {name!r} is neither one of {', '.join(GPUS)} nor a JSON file")
    try:
        gpu = msgspec.json.decode(path.read_bytes(), type=Gpu)
    except (msgspec.MsgspecError, OSError) as error:
        raise InputError(f"{path}: {error}; fields: {', '.join(Gpu.__struct_fields__)}") from error
    for field in Gpu.__struct_fields__[1:]:
        if getattr(gpu, field) <= 0:
            raise InputError(f"{path}: {field}: {getattr(gpu, field)} must be above 0")
    return gpu
