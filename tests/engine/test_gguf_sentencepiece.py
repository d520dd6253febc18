"""SentencePiece's BPE out of a GGUF: the ids of SentencePiece itself, and of the tokenizer that
transformers makes of the same model, on any text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st
from transformers import LlamaTokenizer

from blitzd.engine.gguf import GgufError, GgufFile
from blitzd.engine.gguf_tokenizer import special_ids, tokenizer_json
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from tests.gguf_files import SHAPES, Pieces, QuantisedTensor, tiny_weights, write_gguf

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "<|turn|>"


class Trained:
    """A model of 700 pieces, bytes for what they lack, trained on this project's pages."""

    def __init__(self, directory: Path) -> None:
        corpus = directory / "corpus.txt"
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        corpus.write_text("\n".join(page.read_text() for page in pages))
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(directory / "sp"),
            model_type="bpe",
            vocab_size=700,
            byte_fallback=True,
            character_coverage=0.995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            control_symbols=[CONTROL],
            minloglevel=2,
        )
        self.path = directory / "sp.model"
        self.sp = sentencepiece.SentencePieceProcessor(model_file=str(self.path))

    @property
    def pieces(self) -> Pieces:
        """As llama.cpp's converter writes them."""
        sp = self.sp
        kinds = [
            2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
            for i in range(sp.get_piece_size())
        ]
        return [(sp.id_to_piece(i), sp.get_score(i), kind) for i, kind in enumerate(kinds)]

    @cached_property
    def by_transformers(self) -> LlamaTokenizer:
        model = self.path.with_name("tokenizer.model")
        model.write_bytes(self.path.read_bytes())
        found = LlamaTokenizer.from_pretrained(str(model.parent), legacy=True)
        assert isinstance(found, LlamaTokenizer)
        return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("sp"))


def weights(vocab: int) -> dict[str, QuantisedTensor]:
    found = tiny_weights()
    found["token_embd.weight"] = np.zeros((vocab, 256), np.float32)
    return {name: (values, Kind.F32) for name, values in found.items()}


@pytest.fixture(scope="module")
def ours(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """From a GGUF file through a prepared directory, as a daemon has it."""
    directory = tmp_path_factory.mktemp("gguf")
    pieces = trained.pieces
    path = write_gguf(directory / "sp.gguf", weights(len(pieces)), numbers=SHAPES, pieces=pieces)
    return Tokenizer.from_dir(prepare(path, "float32", directory / "c"))


ANY_TEXT = st.one_of(
    st.text(max_size=60),
    st.text("aehlo the\n\t .,:▁0159é漢🐙‍<>|", max_size=60),
    st.lists(st.sampled_from(["the log", " state", "  ", "\n\n", "漢字", "🐙", "ﬁ", "\u0301"])).map(
        "".join
    ),
)


@settings(max_examples=400, deadline=None)
@given(text=ANY_TEXT)
def test_ids_are_those_of_sentencepiece(trained: Trained, ours: Tokenizer, text: str) -> None:
    begin = trained.sp.bos_id()
    if "\0" in text:
        # SentencePiece's C strings end there for some callers; nobody's prompt has one.
        text = text.replace("\0", "")
    ids = ours.encode(text)
    assert ids == [begin, *trained.sp.encode(text)]
    assert ours.decode(ids) == text.replace("▁", " ")


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_ids_are_those_of_transformers(trained: Trained, ours: Tokenizer, text: str) -> None:
    # Where a text begins with a space, its pre-tokenizer puts none before; SentencePiece does.
    text = text.lstrip(" ▁")
    found = trained.by_transformers(text, add_special_tokens=False).input_ids
    assert ours.encode(text)[1:] == found


def test_a_text_needs_bytes_for_what_no_piece_covers(trained: Trained, ours: Tokenizer) -> None:
    kinds = [kind for _, _, kind in trained.pieces]
    ids = ours.encode("𝕏 the")
    assert [kinds[i] for i in ids].count(6) >= 4
    assert [ours.token_bytes(i) for i in ids if kinds[i] == 6][:4] == [
        bytes([byte]) for byte in "𝕏".encode()
    ]


def test_control_tokens_in_text_are_recognised_and_a_space_follows(
    trained: Trained, ours: Tokenizer
) -> None:
    """As llama.cpp and Llama 2's own tokenizer.json do: each stretch of text gets its space."""
    turn = trained.sp.piece_to_id(CONTROL)
    found = ours.encode(f"the{CONTROL}log")
    assert found == [
        trained.sp.bos_id(), *trained.sp.encode("the"), turn, *trained.sp.encode("log")
    ]  # fmt: skip
    assert ours.encode("<s>the") == found[: len(trained.sp.encode("the")) + 1]
    assert ours.encode("<0x0A>") == [trained.sp.bos_id(), *trained.sp.encode("<0x0A>")]
    assert ours.eos_token_ids == (trained.sp.eos_id(),)


def metadata(directory: Path, pieces: Pieces, **changes: Any) -> dict[str, Any]:
    path = write_gguf(directory / "m.gguf", {}, pieces=pieces)
    found: dict[str, Any] = dict(GgufFile(path).metadata)
    return found | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_without_the_leading_space(trained: Trained, tmp_path: Path) -> None:
    document = tokenizer_json(metadata(tmp_path, trained.pieces, add_space_prefix=False))
    backend = tokenizers.Tokenizer.from_str(document.decode())
    with_space = trained.sp.encode("log is")
    ids = backend.encode("\nlog is", add_special_tokens=False).ids
    assert backend.decode(ids) == "\nlog is"
    assert trained.sp.id_to_piece(ids[0]) != "▁"
    assert backend.encode(" log is", add_special_tokens=False).ids == with_space
    assert backend.decode(with_space) == " log is"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 2, True)),
        ({"add_bos_token": False}, (1, 2, False)),
        ({"bos_token_id": 5, "eos_token_id": 6}, (5, 6, True)),
        ({"model": "gpt2"}, (None, None, False)),
        ({"model": "gpt2", "bos_token_id": 5, "add_bos_token": True}, (5, None, True)),
        ({"model": "gpt2", "bos_token_id": 5, "pre": "llama-bpe"}, (5, None, True)),
        ({"model": "gpt2", "bos_token_id": 5, "pre": "qwen2"}, (5, None, False)),
    ],
)
def test_what_a_file_does_not_say_is_what_llama_cpp_takes(
    trained: Trained,
    tmp_path: Path,
    changes: dict[str, Any],
    expected: tuple[int | None, int | None, bool],
) -> None:
    assert special_ids(metadata(tmp_path, trained.pieces, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; read are 'gpt2'"),
        ({"scores": [0.0]}, "scores does not have one entry a token"),
        ({"scores": [float("nan")] * 700}, "scores has nan"),
        ({"token_type": [1]}, "token_type does not have one number a token"),
        ({"token_type": ["a"] * 700}, "token_type does not have one number a token"),
        ({"tokens": ["a"] * 700}, "tokens has 'a' twice"),
        ({"unknown_token_id": 700}, "unknown_token_id is 700"),
        ({"add_eos_token": True}, "add_eos_token is true"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces true is not supported"),
        ({"tokens": [f"{i}" * 9000 for i in range(700)]}, "too long to be merged"),
    ],
)
def test_what_is_not_supported_is_named(
    trained: Trained, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    found = metadata(tmp_path, trained.pieces, **changes)
    with pytest.raises(GgufError, match=message):
        tokenizer_json(found)
