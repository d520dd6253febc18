"""A GGUF file as a source of weights, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blitzd.engine.gguf import GgufError, GgufFile, Value
from blitzd.engine.gguf_tokenizer import special_ids, tokenizer_json
from blitzd.engine.layout import layout_of, part_rows
from blitzd.engine.model_config import Dtype, ModelConfig, check_config
from blitzd.engine.prepare import Part

ARCHITECTURES = ("llama", "qwen2")
"""By `general.architecture`; Mistral calls itself "llama" there."""

_LAYER_TENSORS = {
    "attn_norm": ("attn_norm.weight",),
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "o": ("attn_output.weight",),
    "mlp_norm": ("ffn_norm.weight",),
    "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "down": ("ffn_down.weight",),
}
_OTHER_TENSORS = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"

END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
"""Control tokens that end a turn whatever the metadata's single end token says."""


class GgufSource:
    """Raises GgufError for what is not supported, naming it."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self._path = path
        self._architecture = self._text("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise GgufError(
                f"{path}: architecture {self._architecture!r}; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        self._check_tensors()

    def config(self, dtype: Dtype) -> ModelConfig:
        heads = self._integer("attention.head_count")
        hidden = self._integer("embedding_length")
        if not heads or (hidden % heads and self._optional("attention.key_length") is None):
            raise GgufError(f"{self._path}: {heads} attention heads for a width of {hidden}")
        head_dim = self._integer("attention.key_length", hidden // heads)
        self._check_rope(head_dim)
        tokens = self._tokens()
        metadata = self.file.metadata
        bos, _, adds_bos = special_ids(metadata)
        return ModelConfig(
            name=str(metadata.get("general.name", self._path.stem)),
            architecture=self._architecture,
            layers=self._integer("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=self._integer("feed_forward_length"),
            vocab=self.file.tensors["token_embd.weight"].shape[0],
            context_tokens=self._integer("context_length"),
            rope_theta=self._number("rope.freq_base", 10000.0),
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            dtype=dtype,
            tied_head="output.weight" not in self.file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
            rope_factors=self._rope_factors(head_dim),
            sliding_window=self._integer("attention.sliding_window", 0),
            bos_token_id=bos,
            add_bos=adds_bos,
            eos_token_ids=self._end_tokens(tokens),
            licence=str(metadata.get("general.license", "")),
        )

    def parts(self, tensor: str) -> list[Part]:
        if not tensor.startswith("layers."):
            name = _OTHER_TENSORS[tensor]
            return [self._part(name)]
        _, index, kind = tensor.split(".")
        return [self._part(f"blk.{index}.{name}") for name in _LAYER_TENSORS[kind]]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.file.read_rows(name, start, stop)

    def write_tokenizer(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_bytes(tokenizer_json(self.file.metadata))
        template = self.file.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            (directory / "chat_template.jinja").write_text(template)

    def _part(self, name: str) -> Part:
        tensor = self.file.tensors[name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        # llama.cpp's converter interleaves q and k for "llama" and leaves "qwen2" alone.
        half_rotated = 0
        if self._architecture == "qwen2" and (".attn_q." in name or ".attn_k." in name):
            heads = self._integer("attention.head_count")
            half_rotated = (
                heads if ".attn_q." in name else self._integer("attention.head_count_kv", heads)
            )
        return Part(name, rows, half_rotated)

    def _check_tensors(self) -> None:
        """Every tensor that the config implies is there in its shape, and no other."""
        if "token_embd.weight" not in self.file.tensors:
            raise GgufError(f"{self._path}: tensor 'token_embd.weight' is missing")
        config = self.config("float32")
        try:
            check_config(config)
        except ValueError as error:
            raise GgufError(f"{self._path}: {error}") from None
        unused = set(self.file.tensors) - {_ROPE_FACTORS}
        for spec in layout_of(config).tensors:
            for source, rows in zip(
                self._names(spec.name), part_rows(config, spec.name), strict=True
            ):
                if source not in self.file.tensors:
                    raise GgufError(f"{self._path}: tensor {source!r} is missing")
                unused.discard(source)
                shape = self.file.tensors[source].shape
                if shape != (rows, *spec.shape[1:]):
                    raise GgufError(
                        f"{self._path}: tensor {source!r} has the shape {shape}; "
                        f"{(rows, *spec.shape[1:])} was expected"
                    )
        if unused:
            raise GgufError(f"{self._path}: tensor {min(unused)!r} is not supported")

    def _names(self, tensor: str) -> list[str]:
        if not tensor.startswith("layers."):
            return [_OTHER_TENSORS[tensor]]
        _, index, kind = tensor.split(".")
        return [f"blk.{index}.{name}" for name in _LAYER_TENSORS[kind]]

    def _check_rope(self, head_dim: int) -> None:
        rotated = self._integer("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise GgufError(
                f"{self._path}: rotary embedding of {rotated} of {head_dim} dimensions "
                "is not supported"
            )
        scaling = self._optional("rope.scaling.type")
        if scaling not in (None, "none"):
            raise GgufError(f"{self._path}: rope.scaling.type {scaling!r} is not supported")
        # Without a type llama.cpp scales by these, linearly; 0 stands for none.
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            factor = self._optional(key)
            if scaling is None and factor not in (None, 0.0, 1.0):
                raise GgufError(f"{self._path}: {key} {factor!r} is not supported")
        values = self._integer("attention.value_length", head_dim)
        if values != head_dim:
            raise GgufError(
                f"{self._path}: attention.value_length {values} beside keys of {head_dim} "
                "is not supported"
            )

    def _rope_factors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self.file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return ()
        # Before it is read: a file with holes may claim any size.
        if tensor.shape != (head_dim // 2,):
            raise GgufError(
                f"{self._path}: tensor {_ROPE_FACTORS!r} has the shape {tensor.shape}; "
                f"{(head_dim // 2,)} was expected"
            )
        return tuple(self.file.read_rows(_ROPE_FACTORS, 0, 1)[0].tolist())

    def _tokens(self) -> list[Any]:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise GgufError(f"{self._path}: no tokenizer.ggml.tokens")
        rows = self.file.tensors["token_embd.weight"].shape[0]
        if len(tokens) > rows:
            raise GgufError(f"{self._path}: {len(tokens)} tokens for an embedding of {rows} rows")
        return tokens

    def _end_tokens(self, tokens: list[Any]) -> tuple[int, ...]:
        kinds = self.file.metadata.get("tokenizer.ggml.token_type")
        _, eos, _ = special_ids(self.file.metadata)
        turn = self.file.metadata.get("tokenizer.ggml.eot_token_id")
        ends = {value for value in (eos, turn) if isinstance(value, int)}
        if isinstance(kinds, list) and len(kinds) == len(tokens):
            control = 3
            named = set(END_TOKENS)
            ends |= {i for i, token in enumerate(tokens) if token in named and kinds[i] == control}
        return tuple(sorted(ends))

    def _optional(self, key: str) -> Value | None:
        return self.file.metadata.get(f"{self._architecture}.{key}")

    def _text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise GgufError(f"{self._path}: {key} is {value!r}; a string is needed")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._optional(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise GgufError(
                f"{self._path}: {self._architecture}.{key} is {value!r}; an integer is needed"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._optional(key)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise GgufError(
                f"{self._path}: {self._architecture}.{key} is {value!r}; a number is needed"
            )
        return float(value)
