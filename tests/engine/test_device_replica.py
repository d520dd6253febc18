"""A replica on a device, as far as it can be had without one: FlashInfer is the stand-in, the
device is memory apart from what peers map, and a graph replays by running again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blitzd.engine import attention_flashinfer, replica
from blitzd.engine.decode_graphs import DecodeGraphs
from blitzd.engine.errors import InvalidField
from tests.engine.flashinfer_contract import Library
from tests.engine.local_replica import LocalReplica, request
from tests.tiny import make_tiny

PROMPTS = {1: "a", 2: "The capital of France", 3: "x" * 64, 4: "naïve café: " * 12, 5: "01" * 99}
LENGTH = 20


class Device:
    """Counts what is captured and replayed, by rows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.library = Library()
        self.captured: list[int] = []
        self.replayed: list[int] = []
        real = importlib.import_module

        def load(name: str) -> Any:
            return self.library if name == "flashinfer" else real(name)

        patch.setattr(attention_flashinfer.importlib, "import_module", load)
        patch.setattr(attention_flashinfer, "WORKSPACE_BYTES", 1 << 13)
        patch.setattr(replica, "model_device", lambda *_: torch.device("cpu"))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(DecodeGraphs, "_capture", self._capture_for)

    @property
    def _capture_for(self) -> Any:
        def capture(graphs: DecodeGraphs, hidden: torch.Tensor, rotation: torch.Tensor) -> Any:
            hidden, rotation, out = hidden.clone(), rotation.clone(), torch.empty_like(hidden)
            model = graphs._model

            def replay() -> None:
                self.replayed.append(len(out))
                out.copy_(model.run_rotated(hidden, rotation, 0, model.config.layers))

            self.captured.append(len(out))
            graph = SimpleNamespace(replay=replay)
            return SimpleNamespace(graph=graph, hidden=hidden, rotation=rotation, out=out)

        return capture


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield Device(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("device") / "tiny", "float64")


def outputs(model: Path, **options: Any) -> dict[int, list[int]]:
    one = LocalReplica(model, max_batch_tokens=48, max_batch_size=8, **options)
    try:
        one.prefill(*[request(number, prompt, LENGTH) for number, prompt in PROMPTS.items()])
        tokens = {number: output.tokens for number, output in one.until(*PROMPTS).items()}
        one.prefill(request(9, PROMPTS[2] * 5, LENGTH, temperature=0.9, seed=4))
        return tokens | {9: one.until(9)[9].tokens}
    finally:
        one.close()


def test_its_tokens_are_those_of_a_replica_on_the_cpu(model: Path, device: Device) -> None:
    expected = outputs(model)
    assert not device.library.calls, "a replica on the CPU asks FlashInfer for nothing"
    assert outputs(model, device="cuda") == expected
    assert sorted(device.captured) == sorted(set(device.replayed)), "each batch size once"
    assert len(device.replayed) > LENGTH
    for wrapper in ("Decode", "PrefillWithPaged", "PrefillWithRagged"):
        assert device.library.count(wrapper, "run") > 0


def test_paced_layers_are_run_one_by_one(model: Path, device: Device) -> None:
    expected = outputs(model)
    assert outputs(model, device="cuda", pace_layer_ms=0.01) == expected
    assert not device.replayed


def test_a_model_that_the_device_cannot_run_is_refused(model: Path) -> None:
    with pytest.raises(InvalidField, match="model_path: tiny has head_dim: 8; accepted on cuda"):
        LocalReplica(model, device="cuda")
