"""A Hugging Face model directory (safetensors, config.json, tokenizer.json) as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from blitzd.engine.bounded_files import MAX_TEXT, check_file, read_bytes, read_json, read_text
from blitzd.engine.hf_config import HfConfig
from blitzd.engine.layout import layout_of, part_rows
from blitzd.engine.model_config import Dtype, ModelConfig, check_config
from blitzd.engine.prepare import Part
from blitzd.engine.safetensors_file import open_tensors, read_rows
from blitzd.engine.tokenizer_probe import probe

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

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._config = HfConfig(directory)
        self._tokenizer = directory / "tokenizer.json"
        self._adds_bos = self._check_tokenizer()
        self._tensors = open_tensors(directory)
        self._check_tensors()

    def config(self, dtype: Dtype) -> ModelConfig:
        found = self._config
        return ModelConfig(
            name=self._name,
            architecture=found.architecture,
            layers=found.layers,
            hidden=found.hidden,
            heads=found.heads,
            kv_heads=found.kv_heads,
            head_dim=found.head_dim,
            ffn=found.integer("intermediate_size"),
            vocab=found.integer("vocab_size"),
            context_tokens=found.integer("max_position_embeddings"),
            rope_theta=found.rope_theta,
            norm_eps=found.number("rms_norm_eps", 1e-6),
            dtype=dtype,
            tied_head=found.tied_head,
            qkv_bias=found.architecture == "qwen2",
            rope_factors=found.rope_factors,
            sliding_window=found.sliding_window,
            bos_token_id=found.bos_token_id,
            add_bos=self._adds_bos,
            eos_token_ids=found.end_tokens(),
        )

    def parts(self, tensor: str) -> list[Part]:
        parts = []
        for name in _names(tensor):
            shape = self._tensors[name].shape
            heads = 0
            if ".q_proj." in name:
                heads = self._config.heads
            elif ".k_proj." in name:
                heads = self._config.kv_heads
            parts.append(Part(name, shape[0] if len(shape) > 1 else 1, heads))
        return parts

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return read_rows(self._tensors[name], start, stop)

    def write_tokenizer(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_bytes(read_bytes(self._tokenizer))
        template = self._chat_template()
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)

    def _check_tensors(self) -> None:
        config = self.config("float32")
        check_config(config)
        unused = {name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")}
        if config.tied_head:
            unused.discard("lm_head.weight")
        for spec in layout_of(config).tensors:
            for name, rows in zip(_names(spec.name), part_rows(config, spec.name), strict=True):
                if name not in self._tensors:
                    raise ValueError(f"{self._directory}: tensor {name!r} is missing")
                unused.discard(name)
                shape = self._tensors[name].shape
                if shape != (rows, *spec.shape[1:]):
                    raise ValueError(
                        f"{self._directory}: tensor {name!r} has the shape {shape}; "
                        f"{(rows, *spec.shape[1:])} was expected"
                    )
        if unused:
            raise ValueError(f"{self._directory}: tensor {min(unused)!r} is not supported")

    def _check_tokenizer(self) -> bool:
        """Whether it puts the beginning-of-sequence token first."""
        if not self._tokenizer.exists():
            raise ValueError(f"{self._directory} has no tokenizer.json")
        if check_file(self._tokenizer) > MAX_TEXT:
            raise ValueError(f"{self._tokenizer} has more than {MAX_TEXT} bytes")
        found = probe(self._tokenizer, self._config.bos_token_id)
        vocab = self._config.integer("vocab_size")
        if found.largest_id >= vocab:
            raise ValueError(
                f"{self._tokenizer}: token {found.largest_token!r} has the id "
                f"{found.largest_id}; the model has {vocab}"
            )
        return found.adds_bos

    def _chat_template(self) -> str | None:
        own = self._directory / "chat_template.jinja"
        if own.exists():
            return read_text(own)
        path = self._directory / "tokenizer_config.json"
        found = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(found, list):
            named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
            found = named[0].get("template") if named else None
        if not isinstance(found, str):
            return None
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}: chat_template is not text: {error}") from None
        return found


def _names(tensor: str) -> list[str]:
    if not tensor.startswith("layers."):
        return [_OTHER_TENSORS[tensor]]
    _, index, kind = tensor.split(".")
    return [f"model.layers.{index}.{name}" for name in _LAYER_TENSORS[kind]]
