"""A Hugging Face model directory (safetensors, config.json, tokenizer.json) as a source."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from blitzd.engine.layout import layout_of
from blitzd.engine.model_config import Dtype, ModelConfig
from blitzd.engine.prepare import Part
from blitzd.engine.safetensors_file import open_tensors, read_rows

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}

_LAYER_TENSORS = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "o": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
_OTHER_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


class HfSource:
    """Raises ValueError for what is not supported, naming it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = _json(directory / "config.json")
        names = self._config.get("architectures") or [None]
        if names[0] not in ARCHITECTURES:
            raise ValueError(
                f"{directory}: architecture {names[0]!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        self._architecture = ARCHITECTURES[names[0]]
        self._check_options()
        self._tensors = open_tensors(directory)
        self._check_tensors()

    def config(self, dtype: Dtype) -> ModelConfig:
        heads, hidden = self._integer("num_attention_heads"), self._integer("hidden_size")
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta", self._config.get("rope_theta", 10000.0)))
        head_dim = self._integer("head_dim", hidden // max(heads, 1))
        bos = self._config.get("bos_token_id")
        tied = bool(self._config.get("tie_word_embeddings", False))
        return ModelConfig(
            name=self._directory.name,
            architecture=self._architecture,
            layers=self._integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._integer("num_key_value_heads", heads),
            head_dim=head_dim,
            ffn=self._integer("intermediate_size"),
            vocab=self._integer("vocab_size"),
            context_tokens=self._integer("max_position_embeddings"),
            rope_theta=theta,
            norm_eps=float(self._config.get("rms_norm_eps", 1e-6)),
            dtype=dtype,
            tied_head=tied,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            rope_factors=rope_factors(rope, theta, head_dim),
            sliding_window=self._sliding_window(),
            bos_token_id=bos if isinstance(bos, int) else None,
            add_bos=isinstance(bos, int) and self._tokenizer_adds(bos),
            eos_token_ids=self._end_tokens(),
        )

    def parts(self, tensor: str) -> list[Part]:
        parts = []
        for name in _names(tensor):
            shape = self._tensors[name].shape
            heads = 0
            if ".q_proj." in name:
                heads = self._integer("num_attention_heads")
            elif ".k_proj." in name:
                heads = self._integer("num_key_value_heads", self._integer("num_attention_heads"))
            parts.append(Part(name, shape[0] if len(shape) > 1 else 1, heads))
        return parts

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return read_rows(self._tensors[name], start, stop)

    def write_tokenizer(self, directory: Path) -> None:
        shutil.copyfile(self._directory / "tokenizer.json", directory / "tokenizer.json")
        template = self._chat_template()
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)

    def _check_options(self) -> None:
        """Options that change the computation and that we do not have."""
        accepted: dict[str, tuple[Any, ...]] = {
            "hidden_act": (None, "silu"),
            "mlp_bias": (None, False),
            "use_sliding_window": (None, False),
            "quantization_config": (None,),
            "partial_rotary_factor": (None, 1.0),
        }
        if self._architecture != "qwen2":
            accepted["attention_bias"] = (None, False)
        for key, values in accepted.items():
            found = self._config.get(key)
            if found not in values:
                raise ValueError(f"{self._directory}: {key} {found!r} is not supported")

    def _check_tensors(self) -> None:
        config = self.config("float32")
        unused = {name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")}
        if config.tied_head:
            unused.discard("lm_head.weight")
        for spec in layout_of(config).tensors:
            elements = 0
            for name in _names(spec.name):
                if name not in self._tensors:
                    raise ValueError(f"{self._directory}: tensor {name!r} is missing")
                unused.discard(name)
                shape = self._tensors[name].shape
                if len(shape) != len(spec.shape) or shape[1:] != spec.shape[1:]:
                    raise ValueError(
                        f"{self._directory}: tensor {name!r} has the shape {shape}; "
                        f"{spec.name} has {spec.shape}"
                    )
                elements += shape[0]
            if elements != spec.shape[0]:
                raise ValueError(
                    f"{self._directory}: {spec.name} needs {spec.shape[0]} rows; "
                    f"its tensors have {elements}"
                )
        if unused:
            raise ValueError(f"{self._directory}: tensor {min(unused)!r} is not supported")

    def _sliding_window(self) -> int:
        # Qwen2 records a window that `use_sliding_window` leaves off.
        window = None if self._architecture == "qwen2" else self._config.get("sliding_window")
        return window if isinstance(window, int) else 0

    def _end_tokens(self) -> tuple[int, ...]:
        ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            path = self._directory / name
            value = _json(path).get("eos_token_id") if path.exists() else None
            ends.update(i for i in (value if isinstance(value, list) else [value]) if i is not None)
        return tuple(sorted(ends))

    def _tokenizer_adds(self, bos: int) -> bool:
        try:
            backend = tokenizers.Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"{self._directory / 'tokenizer.json'}: {error}") from error
        return bool(backend.encode("a", add_special_tokens=True).ids[:1] == [bos])

    def _chat_template(self) -> str | None:
        own = self._directory / "chat_template.jinja"
        if own.exists():
            return own.read_text()
        path = self._directory / "tokenizer_config.json"
        found = _json(path).get("chat_template") if path.exists() else None
        if isinstance(found, list):
            found = next((t.get("template") for t in found if t.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self._directory}: {key} is {value!r}; an integer is needed")
        return value


def rope_factors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """What divides each rotary frequency, for the scalings "linear" and "llama3" (Llama 3.1:
    long wavelengths are stretched by `factor`, short ones kept, those between interpolated).
    Raises ValueError for another scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; default, linear and llama3 are")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # In float32 and by transformers' operations (torch divides a number by a tensor through
    # the reciprocal), so that far positions are rotated by the same angle.
    one = np.float32(1.0)
    plain = one / (theta ** exponents.astype(np.float64)).astype(np.float32)
    wavelengths = one / plain * np.float32(2 * math.pi)
    smooth = (one / wavelengths * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (one - smooth) * plain / np.float32(factor) + smooth * plain
    stretched = np.where(wavelengths > original / low, plain / np.float32(factor), between)
    scaled = np.where(wavelengths < original / high, plain, stretched)
    return tuple((plain.astype(np.float64) / scaled).tolist())


def _names(tensor: str) -> list[str]:
    if not tensor.startswith("layers."):
        return [_OTHER_TENSORS[tensor]]
    _, index, kind = tensor.split(".")
    return [f"model.layers.{index}.{name}" for name in _LAYER_TENSORS[kind]]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
