"""The tokenizer against the `tokenizers` package's own decoding, and chat templates."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, strategies as st

from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.chat_template import ChatTemplate
from blitzd.engine.detokenizer import Detokenizer
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from blitzd.node.face import ChatTokenizer
from tests.tiny import END, START, make_tiny

needs_model = pytest.mark.skipif(
    not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run"
)


@pytest.fixture(scope="module")
def embedded() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    directory = prepare(resolve(DEFAULT_MODEL), "float32", prepared_dir())
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Tokenizer.from_dir(directory), backend


@needs_model
@given(text=st.text(max_size=60))
def test_round_trip_of_any_text(
    embedded: tuple[Tokenizer, tokenizers.Tokenizer], text: str
) -> None:
    tokenizer, backend = embedded
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    # The vocabulary lacks some control bytes, which the package drops too.
    if text.isprintable() and not any(s in text for s in ("<|", "<file", "<repo")):
        assert tokenizer.decode(ids) == text


@needs_model
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_any_ids_decode_as_the_package_does_whole_and_streamed(
    embedded: tuple[Tokenizer, tokenizers.Tokenizer], ids: list[int]
) -> None:
    tokenizer, backend = embedded
    expected = backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == expected
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.feed(i)[0] for i in ids) + detokenizer.flush() == expected


@needs_model
def test_the_embedded_chat_template(embedded: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    tokenizer: ChatTokenizer = embedded[0]
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt)[:3] == [1, 9690, 198]


def test_specials_in_text_are_recognised_and_begin_is_added_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_tiny(tmp_path / "tiny", add_bos=True))
    assert tokenizer.encode("a<|end|>") == [START, ord("a"), END]
    assert tokenizer.encode("<|start|>a") == [START, ord("a")]
    assert tokenizer.eos_token_ids == (END,)
    with pytest.raises(ValueError, match="token id 259 is outside"):
        tokenizer.decode([259])


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    (directory / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_dir(directory)


def write_sentencepiece(directory: Path) -> tokenizers.Tokenizer:
    """A tokenizer of Llama 2's kind: spaces as "▁", unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "▁h", "he", "é", "▁he"]
    merges = [("▁", "h"), ("h", "e"), ("▁h", "e")]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    return backend


def test_sentencepiece_spelling(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny", bos_token_id=1, add_bos=True, eos_token_ids=(2,))
    backend = write_sentencepiece(directory)
    tokenizer = Tokenizer.from_dir(directory)
    for text in ("hello", " hello", "hé 🐙 he", "two  spaces\n", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        # Streamed text goes on from a prompt, so its first space is kept.
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join(detokenizer.feed(i)[0] for i in ids) + detokenizer.flush()
        assert streamed == (f" {text}" if text else "")


def test_an_unknown_spelling_is_named(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    path = directory / "tokenizer.json"
    text = path.read_text().replace(
        '"decoder":{"type":"ByteLevel"', '"decoder":{"type":"WordPiece"'
    )
    path.write_text(text)
    with pytest.raises(ValueError, match="decoder WordPiece"):
        Tokenizer.from_dir(directory)


USER = [{"role": "user", "content": "Hi"}]


def test_a_template_sees_what_models_expect() -> None:
    source = (
        "{{ bos_token }}{%- if messages[0].role == 'system' %}{{ messages[0]['content'] | trim }}"
        "{%- endif %}{%- for m in messages if m.role != 'system' %}[{{ loop.index0 }}:{{ m.role }}]"
        "{{ m.content }}{{ '!' * 2 }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ {'a': 'é<'} | tojson }}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ 'n=' ~ ns.n }}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    found = template.render([{"role": "system", "content": " be kind "}, *USER])
    assert found == '<s>be kind[0:user]Hi!!</s>{"a": "é<"}n=3'


def test_a_refusal_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses messages: roles must alternate"):
        template.render(USER)
    with pytest.raises(ValueError, match=r"messages\[1\].role is 'robot'"):
        template.render([*USER, {"role": "robot", "content": ""}])


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}"
    "{% endfor %}",
    "huge range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "times": "{{ 'x' * 10 ** 10 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "doubling by join": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "join method": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x.join([n.x, n.x, n.x]) %}{% endfor %}",
    "one large join": "{{ ('x' * 8000000).join('y' * 8000000) }}",
    "squaring": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "set block": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "big set block": "{% set n = 'x' * 9999 %}{% set y %}{% for i in range(99999) %}{{ n }}"
    "{% endfor %}{% endset %}",
    "shared branches": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "shared dicts": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x == 1 }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "format width": "{{ '%10000000000d' % 1 }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "center": "{{ 'x'.center(10 ** 10) }}",
    "batch fill": "{{ [1] | batch(10 ** 10, 0) | list | length }}",
    "round": "{{ 1.5 | round(-(10 ** 9), 'ceil') }}",
    "much output": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "python by attr": "{{ ('' | attr('__class__')).mro() }}",
    "include": "{% include 'self' %}",
    "mutation": "{{ messages.append(1) }}",
    "missing": "{{ messages[9].content.strip() }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_quickly(name: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"chat template .*: \S") as refused:
        ChatTemplate(HOSTILE[name]).render(USER)
    assert time.process_time() - start < 3.0
    assert "out of memory" not in str(refused.value)
