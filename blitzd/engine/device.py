"""Whether this machine has the device that a worker is told to use. No torch here: a wrong
option is refused at once, not after seconds of imports."""

from __future__ import annotations

import ctypes
import importlib.util

from blitzd.engine.options import Device


def check_device(device: Device) -> None:
    """Raises ValueError saying what is missing, and what would be accepted."""
    if device == "cuda" and (missing := _missing()):
        raise ValueError(f"device: cuda, but {missing}; accepted here: cpu")


def _missing() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver finds no device (CUresult {code})"
    if not count.value:
        return "the CUDA driver lists no device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (the extra blitzd[cuda])"
    return None
