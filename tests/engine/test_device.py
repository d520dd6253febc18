"""A worker that is told to use a device which is not there says so, and at once; replicas of a
node take turns on the devices that are."""

import ctypes
import os
import subprocess
import sys

import pytest

from blitzd.engine import device
from blitzd.engine.device import claim_device, devices_of
from blitzd.engine.options import ReplicaOptions


class Driver:
    """Counts devices when it is initialised, as libcuda does: the environment is read once."""

    def __init__(self, init: int, devices: int) -> None:
        self._init, self._devices = init, devices

    def cuInit(self, flags: int) -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            # Names of devices up to the first that is not there, as CUDA documents it.
            known = [name for name in visible.split(",") if int(name) < self._devices]
            self._devices = len(known)
        return self._init or (0 if self._devices else 100)

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = self._devices  # type: ignore[attr-defined]
        return 0


def missing_driver(name: str) -> Driver:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, and FlashInfer."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0, 3))
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("load", "installed", "message"),
    [
        (missing_driver, True, r"there is no CUDA driver \(libcuda.so.1\); accepted here: cpu"),
        (lambda name: Driver(100, 0), True, r"finds no device \(CUresult 100\)"),
        (lambda name: Driver(0, 1), False, r"flashinfer is not installed \(the extra"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, load: object, installed: bool, message: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(
        device.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    for resolve in (devices_of, claim_device):
        with pytest.raises(ValueError, match=f"device: cuda, but .*{message}"):
            resolve("cuda")
    assert devices_of("cpu") == devices_of("auto") == ("cpu",)
    assert claim_device("cpu") == claim_device("auto") == "cpu"


def test_a_name_that_is_no_device_is_refused() -> None:
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", ""):
        with pytest.raises(ValueError, match="accepted: cpu, cuda, cuda:N, auto"):
            devices_of(name)
        with pytest.raises(ValueError, match="accepted: cpu, cuda, cuda:N, auto"):
            claim_device(name)


def test_a_node_has_every_visible_gpu_or_the_one_that_is_named(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices_of("cuda") == devices_of("auto") == ("cuda:0", "cuda:1", "cuda:2")
    assert devices_of("cuda:2") == ("cuda:2",)
    with pytest.raises(ValueError, match="device: cuda:3, but the CUDA driver lists cuda:0, cuda:"):
        devices_of("cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert devices_of("cuda") == ("cuda:0", "cuda:1")


def test_a_worker_sees_its_gpu_only(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert claim_device("cuda:1") == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert claim_device("cuda:1") == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with pytest.raises(ValueError, match="cuda:2, but CUDA_VISIBLE_DEVICES names 2 of them"):
        claim_device("cuda:2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="the CUDA driver finds no device"):
        claim_device("cuda:7")


def test_a_device_takes_no_copy_beside_its_own() -> None:
    with pytest.raises(ValueError, match="weights: copy, but a device has a copy of its own"):
        ReplicaOptions(device="cuda", weights="copy")


def test_the_question_is_answered_without_torch() -> None:
    program = "import blitzd.cli.worker, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
