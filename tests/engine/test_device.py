"""A worker that is told to use a device which is not there says so, and at once."""

import ctypes
import subprocess
import sys

import pytest

from blitzd.engine import device
from blitzd.engine.device import check_device


class Driver:
    def __init__(self, init: int, devices: int) -> None:
        self._init, self._devices = init, devices

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = self._devices  # type: ignore[attr-defined]
        return 0


def missing_driver(name: str) -> Driver:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "installed", "message"),
    [
        (missing_driver, True, r"there is no CUDA driver \(libcuda.so.1\); accepted here: cpu"),
        (lambda name: Driver(100, 0), True, r"finds no device \(CUresult 100\)"),
        (lambda name: Driver(0, 0), True, "lists no device"),
        (lambda name: Driver(0, 1), False, r"flashinfer is not installed \(the extra"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, load: object, installed: bool, message: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(
        device.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    with pytest.raises(ValueError, match=f"device: cuda, but .*{message}"):
        check_device("cuda")
    check_device("cpu")


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0, 1))
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object())
    check_device("cuda")


def test_the_question_is_answered_without_torch() -> None:
    program = "import blitzd.cli.worker, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
