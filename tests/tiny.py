"""A tiny Llama with random weights, as a prepared model directory.

Its tokenizer spells every text byte by byte (ids 0 to 255) and knows three special
tokens, so any string is a valid prompt and any id below 256 is a byte of output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blitzd.engine.layout import layout_of
from blitzd.engine.model_config import Dtype, ModelConfig
from blitzd.engine.prepare import Part, build
from blitzd.engine.tokenizer import BYTE_OF_CHARACTER

END, TURN, START = 256, 257, 258
SPECIALS = {"<|end|>": END, "<|turn|>": TURN, "<|start|>": START}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}"
    "<|turn|>{% endfor %}<|start|>assistant: "
)


def tiny_config(dtype: Dtype = "float32", **changes: Any) -> ModelConfig:
    config = ModelConfig(
        name="tiny",
        architecture="llama",
        layers=4,
        hidden=48,
        heads=6,
        kv_heads=2,
        head_dim=8,
        ffn=96,
        vocab=259,
        context_tokens=2048,
        rope_theta=10000.0,
        norm_eps=1e-5,
        dtype=dtype,
        tied_head=True,
        bos_token_id=START,
        eos_token_ids=(END,),
    )
    return msgspec.structs.replace(config, **changes)


class RandomSource:
    """Weights drawn from `seed`; the same for every dtype, apart from rounding."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._config = config
        self._shapes = {spec.name: spec.shape for spec in layout_of(config).tensors}
        random = np.random.default_rng(seed)
        # Wide enough that the greedy token is rarely a near tie.
        self.tensors: dict[str, NDArray[np.float64]] = {
            name: 1.0 + 0.1 * random.standard_normal(shape)
            if name.endswith("norm")
            else random.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
            for name, shape in self._shapes.items()
        }

    def config(self, dtype: Dtype) -> ModelConfig:
        return msgspec.structs.replace(self._config, dtype=dtype)

    def parts(self, tensor: str) -> list[Part]:
        shape = self._shapes[tensor]
        return [Part(tensor, shape[0] if len(shape) > 1 else 1)]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float64]:
        tensor = self.tensors[name]
        return tensor.reshape(-1, tensor.shape[-1])[start:stop]

    def write_tokenizer(self, directory: Path) -> None:
        vocab = dict(BYTE_OF_CHARACTER)
        added = [
            {
                "id": i, "content": text, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
            for text, i in SPECIALS.items()
        ]  # fmt: skip
        bytes_only = {
            "type": "ByteLevel", "add_prefix_space": False,
            "trim_offsets": True, "use_regex": False,
        }  # fmt: skip
        document = {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": bytes_only,
            "decoder": bytes_only,
            "model": {"type": "BPE", "vocab": vocab | SPECIALS, "merges": []},
        }
        (directory / "tokenizer.json").write_bytes(msgspec.json.encode(document))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_tiny(directory: Path, dtype: Dtype = "float32", *, seed: int = 0, **changes: Any) -> Path:
    """Writes the prepared directory `directory`; `changes` are fields of ModelConfig."""
    config = tiny_config(dtype, **changes)
    build(RandomSource(config, seed), dtype, directory)
    return directory
