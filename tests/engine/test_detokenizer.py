"""Streaming text: never half a character, never a part of a stop string, nothing lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from blitzd.engine.detokenizer import Detokenizer


class Pieces:
    """A vocabulary given as byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(Pieces(pieces), stop)
    texts: list[str] = []
    for token in range(len(pieces)):
        text, stopped = detokenizer.feed(token)
        texts.append(text)
        if stopped:
            return texts, True
    return [*texts, detokenizer.flush()], False


def test_a_character_waits_for_its_last_byte() -> None:
    octopus = "🐙".encode()
    assert run([b"a" + octopus[:1], octopus[1:3], octopus[3:] + b"b"])[0] == ["a", "", "🐙b", ""]


def test_a_character_cut_short_is_replaced_at_the_end() -> None:
    assert run([b"a", "é".encode()[:1]])[0] == ["a", "", "\ufffd"]


def test_bytes_that_are_no_text_are_replaced_at_once() -> None:
    assert run([b"\xff", b"a"])[0] == ["\ufffd", "a", ""]


def test_a_stop_string_over_several_tokens_is_never_seen() -> None:
    texts, stopped = run([b"one E", b"N", b"D two"], ("END",))
    assert (texts, stopped) == (["one ", "", ""], True)


def test_what_only_began_like_a_stop_string_comes_later() -> None:
    assert run([b"one E", b"N", b"A"], ("END",))[0] == ["one ", "", "ENA", ""]


def test_what_was_held_comes_with_flush() -> None:
    assert run([b"one EN"], ("END",)) == (["one ", "EN"], False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run([b"a, b. c"], (".", ",")) == (["a"], True)
    for pieces in ([b"xabc"], [b"xa", b"b", b"c"]):
        texts, stopped = run(pieces, ("abc", "b"))
        assert ("".join(texts), stopped) == ("xa", True)


def test_text_after_the_stop_is_gone_for_good() -> None:
    detokenizer = Detokenizer(Pieces([b"x|y", b"z"]), ("|",))
    assert detokenizer.feed(0) == ("x", True)
    assert detokenizer.feed(1) == ("", True)
    assert detokenizer.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        Detokenizer(Pieces([]), ("a", ""))


texts = st.text(alphabet="abé🐙\n", max_size=30)
stops = st.lists(st.text(alphabet="abé🐙", min_size=1, max_size=4), max_size=3)


@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=10), stop=stops)
def test_streaming_equals_cutting_the_whole(text: str, cuts: list[int], stop: list[str]) -> None:
    data = text.encode()
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    streamed, stopped = run(pieces, tuple(stop))
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    assert stopped == bool(found)
    assert "".join(streamed) == (text[: min(found)[1]] if found else text)


@given(text=texts, stop=stops, keep=st.integers(0, 30))
def test_what_was_given_out_never_depends_on_what_comes(
    text: str, stop: list[str], keep: int
) -> None:
    """Resuming: feeding the same tokens to a fresh one gives the same text."""
    pieces = [bytes([byte]) for byte in text.encode()]
    whole, _ = run(pieces, tuple(stop))
    part = Detokenizer(Pieces(pieces), stop)
    given_out = [part.feed(token)[0] for token in range(min(keep, len(pieces)))]
    assert "".join(whole).startswith("".join(given_out))


@given(data=st.binary(max_size=40))
def test_any_bytes_decode_as_a_whole_does(data: bytes) -> None:
    streamed, _ = run([bytes([byte]) for byte in data])
    assert "".join(streamed) == data.decode(errors="replace")
