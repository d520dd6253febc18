"""Which devices this machine has for replicas. No torch here: a wrong option is refused at
once, not after seconds of imports."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re

from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import Device

_VISIBLE = "CUDA_VISIBLE_DEVICES"

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")


def devices_of(choice: str) -> tuple[str, ...]:
    """What replicas take turns on: ("cpu",), or the names "cuda:N" of visible GPUs.

    `choice` is cpu, cuda (every visible GPU), cuda:N, or auto (cuda where it can be had, else
    cpu). Raises ValueError saying what is missing, and what would be accepted.
    """
    number = _number(choice)
    if choice == "cpu":
        return ("cpu",)
    count, missing = _cuda()
    if missing:
        if choice == "auto":
            return ("cpu",)
        raise ValueError(f"device: {choice}, but {missing}; accepted here: cpu")
    if number is None:
        return tuple(f"cuda:{index}" for index in range(count))
    if number >= count:
        names = ", ".join(f"cuda:{index}" for index in range(count))
        raise ValueError(f"device: {choice}, but the CUDA driver lists {names}")
    return (choice,)


def claim_device(choice: str) -> Device:
    """For a process that runs one replica: checks as `devices_of` does, and hides all GPUs but
    the chosen one, so that it is the current device of every thread and every library.

    CUDA must not be in use yet: the driver reads the environment once.
    """
    number = _number(choice)
    if number is not None:
        visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
        if visible and number >= len(visible):
            raise ValueError(f"device: {choice}, but {_VISIBLE} names {len(visible)} of them")
        os.environ[_VISIBLE] = visible[number] if visible else str(number)
        choice = "cuda"
    return "cpu" if devices_of(choice) == ("cpu",) else "cuda"


def unsupported(config: ModelConfig) -> str | None:
    """Why FlashInfer cannot run a model: the field, its value and what is accepted."""
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim: {config.head_dim}; accepted on cuda: {', '.join(map(str, HEAD_DIMS))}"
    if config.dtype not in DTYPES:
        return f"dtype: {config.dtype}; accepted on cuda: {', '.join(DTYPES)}"
    return None


def _number(choice: str) -> int | None:
    if not re.fullmatch(r"cpu|auto|cuda(:\d{1,3})?", choice):
        raise ValueError(f"device: {choice!r}; accepted: cpu, cuda, cuda:N, auto")
    _, _, number = choice.partition(":")
    return int(number) if number else None


def _cuda() -> tuple[int, str]:
    """(visible GPUs, what is missing to use them)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "there is no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0, f"the CUDA driver finds no device (CUresult {code})"
    if not count.value:
        return 0, "the CUDA driver lists no device"
    if importlib.util.find_spec("flashinfer") is None:
        return 0, "flashinfer is not installed (the extra blitzd[cuda])"
    return count.value, ""
