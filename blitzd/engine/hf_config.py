"""What config.json of a Hugging Face model says, in our terms; what we do not compute is
refused by name.

Missing keys mean what transformers' configuration classes mean by them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from blitzd.engine.bounded_files import read_json
from blitzd.engine.model_config import LIMITS, check_theta

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}

ROPE_SCALINGS = ("default", "linear", "llama3")

_WINDOW = 4096
"""Of Mistral and Qwen2 configurations that name none."""
_FULL_LAYERS = 28
"""Of Qwen2's: `max_window_layers`."""


class HfConfig:
    """`directory`/config.json, checked. Raises ValueError for what is not supported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._values = read_json(directory / "config.json")
        names = self._values.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"{directory}: architecture {name!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[name]
        self._check_options()
        self.layers = self._bounded("num_hidden_layers", "layers")
        self.hidden = self._bounded("hidden_size", "hidden")
        self.heads = self._bounded("num_attention_heads", "heads")
        self.kv_heads = self.integer("num_key_value_heads", self.heads)
        self.head_dim = self._head_dim()
        self.tied_head = self._flag("tie_word_embeddings")
        self.rope_theta, self.rope_factors = self._rope()
        self.sliding_window = self._window()

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self.directory}: {key} is {value!r}; an integer is needed")
        return value

    def _bounded(self, key: str, field: str, default: int | None = None) -> int:
        """What lists are made of below, before the whole is checked."""
        value = self.integer(key, default)
        if not 1 <= value <= LIMITS[field]:
            raise ValueError(
                f"{self.directory}: {key} is {value}; it must be between 1 and {LIMITS[field]}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key, default)
        return _number(f"{self.directory}: {key}", value)

    def _flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.directory}: {key} is {value!r}; true or false is needed")
        return bool(value)

    @property
    def bos_token_id(self) -> int | None:
        bos = self._values.get("bos_token_id")
        return bos if isinstance(bos, int) else None

    def end_tokens(self) -> tuple[int, ...]:
        """Of config.json and of generation_config.json, where chat models name more."""
        more = self.directory / "generation_config.json"
        ends: set[int] = set()
        for values in (self._values, read_json(more) if more.exists() else {}):
            value = values.get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int) and not isinstance(token, bool):
                    ends.add(token)
                elif token is not None:
                    raise ValueError(f"{self.directory}: eos_token_id has {token!r}")
        return tuple(sorted(ends))

    def _check_options(self) -> None:
        """Options that change the computation and that we do not have."""
        accepted: dict[str, tuple[Any, ...]] = {
            "hidden_act": (None, "silu"),
            "mlp_bias": (None, False),
            "quantization_config": (None,),
            "partial_rotary_factor": (None, 1.0),
        }
        if self.architecture != "qwen2":  # which has biases of its own, and no such option
            accepted["attention_bias"] = (None, False)
        for key, values in accepted.items():
            found = self._values.get(key)
            if found not in values:
                raise ValueError(f"{self.directory}: {key} {found!r} is not supported")

    def _head_dim(self) -> int:
        if self._values.get("head_dim") is None and self.hidden % self.heads:
            raise ValueError(
                f"{self.directory}: hidden_size {self.hidden} is not a multiple of "
                f"num_attention_heads {self.heads}, and there is no head_dim"
            )
        return self._bounded("head_dim", "head_dim", self.hidden // self.heads)

    def _rope(self) -> tuple[float, tuple[float, ...]]:
        rope = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if (
            not isinstance(rope, dict)
            or any(isinstance(value, dict) for value in rope.values())
            or rope.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise ValueError(f"{self.directory}: rope_parameters {rope!r} are not supported")
        try:
            theta = _number(
                "rope_theta", rope.get("rope_theta", self._values.get("rope_theta", 10000.0))
            )
            check_theta(theta)
            return theta, rope_factors(rope, theta, self.head_dim)
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from None

    def _window(self) -> int:
        """0 when every layer sees all. Qwen2 may let its first layers see all and the others
        a window, which we do not compute; Llama has no windows."""
        window = {"llama": None}.get(self.architecture, self._values.get("sliding_window", _WINDOW))
        if self.architecture == "qwen2" and not self._flag("use_sliding_window"):
            window = None
        kinds = self._values.get("layer_types")
        if kinds is None and self.architecture == "qwen2" and window is not None:
            full = self.integer("max_window_layers", _FULL_LAYERS)
            kinds = ["full_attention"] * min(full, self.layers)
            kinds += ["sliding_attention"] * (self.layers - len(kinds))
        if kinds is not None and self.architecture == "qwen2":
            found = set(map(str, kinds)) if isinstance(kinds, list) else {repr(kinds)}
            if not found <= {"full_attention", "sliding_attention"} or len(found) != 1:
                raise ValueError(
                    f"{self.directory}: layers of the kinds {', '.join(sorted(found))}; "
                    "supported are full_attention for all, or sliding_attention for all"
                )
            if found == {"full_attention"}:
                window = None
        if window is None:
            return 0
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"{self.directory}: sliding_window is {window!r}")
        return window


def rope_factors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """What divides each rotary frequency, for the scalings "linear" and "llama3" (Llama 3.1:
    long wavelengths are stretched by `factor`, short ones kept, those between interpolated).
    Raises ValueError for another scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_SCALINGS)} are")
    if kind == "default":
        return ()
    factor = _number("rope factor", rope.get("factor"))
    longest = LIMITS["context_tokens"]
    if not 1 <= factor <= longest:
        raise ValueError(f"rope factor is {factor}; it must be between 1 and {longest}")
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    low, high, original = (
        _number(key, rope.get(key))
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not 0 < low < high <= longest or not 0 < original <= longest:
        raise ValueError(
            f"low_freq_factor {low} and high_freq_factor {high} over "
            f"{original} positions make no sense"
        )
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


def _number(what: str, value: object) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:
        pass
    raise ValueError(f"{what} is {value!r}; a number is needed")
