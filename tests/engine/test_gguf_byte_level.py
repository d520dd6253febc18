"""Byte-level BPE out of a GGUF: text is split as the models' own tokenizers split it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, model_path
from blitzd.engine.gguf import GgufFile
from blitzd.engine.gguf_tokenizer import tokenizer_json

pytestmark = pytest.mark.skipif(
    not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run"
)

TEXT = st.one_of(
    st.text(max_size=60),
    st.text("aBz éß漢🐙 \t\n\r019._-'!?|<>/\u0301", max_size=60),
    st.lists(
        st.sampled_from(["don't", "I'LL", " 12345", "  ", "\n\n", "\r\n", " the", "e\u0301", "!?!"])
    ).map("".join),
)


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    """The embedded model's: 49,152 tokens of byte-level BPE."""
    found: dict[str, Any] = dict(GgufFile(model_path(CATALOGUE[DEFAULT_MODEL])).metadata)
    # Without added tokens, which the references would have to be told about.
    found["tokenizer.ggml.token_type"] = [1] * len(found["tokenizer.ggml.tokens"])
    return found


def ours(vocabulary: dict[str, Any], pre: str) -> Tokenizer:
    document = tokenizer_json(vocabulary | {"tokenizer.ggml.pre": pre})
    return Tokenizer.from_str(document.decode())


@pytest.fixture(scope="module")
def pairs(vocabulary: dict[str, Any]) -> dict[str, tuple[Tokenizer, Any]]:
    vocab = {token: i for i, token in enumerate(vocabulary["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary["tokenizer.ggml.merges"]]
    options = {"unk_token": None, "bos_token": None, "eos_token": None, "pad_token": None}
    return {
        "gpt-2": (
            ours(vocabulary, "gpt-2"),
            GPT2Tokenizer(vocab=vocab, merges=merges, **options)._tokenizer,
        ),
        "qwen2": (
            ours(vocabulary, "qwen2"),
            Qwen2Tokenizer(vocab=vocab, merges=merges, **options)._tokenizer,
        ),
    }


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_ids_are_those_of_transformers(
    pairs: dict[str, tuple[Tokenizer, Any]], pre: str, text: str
) -> None:
    found, expected = pairs[pre]
    assert (
        found.encode(text, add_special_tokens=False).ids
        == expected.encode(text, add_special_tokens=False).ids
    )


@pytest.fixture(scope="module")
def like_llama3(vocabulary: dict[str, Any]) -> list[Any]:
    """Ours, then what transformers converts Llama 3's tokenizer to."""
    names = ("llama-bpe", "llama3", "llama-v3")
    reference = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return [*(ours(vocabulary, name).pre_tokenizer for name in names), reference]


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_text_is_split_as_llama_3_does(like_llama3: list[Any], text: str) -> None:
    *found, expected = (splitter.pre_tokenize_str(text) for splitter in like_llama3)
    assert found == [expected] * 3


def test_a_file_that_does_not_say_is_split_as_llama_cpp_does(vocabulary: dict[str, Any]) -> None:
    """Punctuation apart, numbers in threes from the left."""
    silent = {key: vocabulary[key] for key in vocabulary if key != "tokenizer.ggml.pre"}
    splitter: Any = Tokenizer.from_str(tokenizer_json(silent).decode()).pre_tokenizer
    pieces = [piece for piece, _ in splitter.pre_tokenize_str("Say 'x+y' 1234567 don't")]
    assert pieces == ["Say", "Ġ", "'", "x", "+", "y", "'", "Ġ", "123", "456", "7", "Ġdon", "'", "t"]
