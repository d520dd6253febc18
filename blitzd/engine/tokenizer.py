"""Text to token ids and back, and chat messages to a prompt.

Works on the `tokenizer.json` and `chat_template.jinja` of a prepared model directory.
No torch here: the HTTP routes use it in the daemon.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import tokenizers

from blitzd.engine.chat_template import ChatTemplate
from blitzd.engine.layout import read_model_file

Spelling = Literal["bytes", "sentencepiece"]

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """Thread-safe after construction, except that `token_bytes` fills a cache."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        bos_token_id: int | None,
        add_bos: bool,
        eos_token_ids: tuple[int, ...],
        spelling: Spelling,
        strips_space: bool,
    ) -> None:
        # What is too long is refused, not cut; and nothing is made longer than it is.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling
        self._strips_space = strips_space
        self._template = template
        self._bos = backend.id_to_token(bos_token_id) if bos_token_id is not None else None
        self._bos_id = bos_token_id if add_bos else None
        self.eos_token_ids = eos_token_ids
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._literal = {i: token.content.encode() for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, directory: Path) -> Tokenizer:
        """Raises FileNotFoundError, or ValueError for a tokenizer that cannot be used."""
        config = read_model_file(directory).config
        path = directory / "tokenizer.json"
        text = path.read_text()
        try:
            # Of megabytes, these few: reading all of it takes a quarter of a load's time.
            decoder = msgspec.json.decode(text, type=_Document).decoder
            spelling = _spelling(decoder)
            strips_space = any(one["type"] == "Strip" for one in decoder.get("decoders", []))
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"{path} cannot be used: {error}") from error
        template = directory / "chat_template.jinja"
        bos = config.bos_token_id
        eos = config.eos_token_ids
        return cls(
            backend,
            ChatTemplate(
                template.read_text(),
                bos_token=(backend.id_to_token(bos) or "") if bos is not None else "",
                eos_token=(backend.id_to_token(eos[0]) or "") if eos else "",
            )
            if template.exists()
            else None,
            bos,
            config.add_bos,
            eos,
            spelling,
            strips_space,
        )

    @property
    def vocab(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Special tokens written out in `text` are recognised. The beginning-of-sequence
        token is put first when the model wants one and the text does not begin with it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens; what is not UTF-8 becomes U+FFFD. A text loses the space
        that its encoding put first."""
        text = b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: empty for a special one. A character may be spread
        over several tokens. Raises ValueError for an id outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._token_bytes(token_id)
        return cached

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """(a token's name for people, the bytes it adds to the text). What is not UTF-8 by
        itself becomes U+FFFD in the name; a special token, or an id that the model has and
        the tokenizer has not, has a name and adds nothing."""
        name = self._backend.id_to_token(token_id)
        if token_id in self._special or name is None:
            return name or f"<{token_id}>", b""
        own = self.token_bytes(token_id)
        return own.decode(errors="replace"), own

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text for `messages`, ready to encode, up to where the assistant speaks.

        Raises ValueError, naming the message where one is at fault, when the model has no
        chat template or its template refuses them.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; use the completions route")
        return self._template.render(messages)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        if token_id in self._literal:
            return self._literal[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"token id {token_id} is outside the vocabulary")
        if self._spelling == "sentencepiece":
            if _BYTE_TOKEN.fullmatch(token):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()


class _Document(msgspec.Struct):
    """What we look at ourselves of a tokenizer.json."""

    decoder: dict[str, Any]


def _spelling(decoder: dict[str, Any]) -> Spelling:
    """How a vocabulary writes bytes: GPT-2's characters, or SentencePiece's "▁" for a space
    and "<0x0A>" for a byte that no token covers."""
    if decoder["type"] == "ByteLevel":
        return "bytes"
    members = [member["type"] for member in decoder.get("decoders", [])]
    if members[:3] == ["Replace", "ByteFallback", "Fuse"]:
        return "sentencepiece"
    raise ValueError(
        f"decoder {decoder['type']} of {members or 'nothing'}; supported are ByteLevel, and "
        "Replace, ByteFallback, Fuse"
    )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 bytes
    for the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update((chr(256 + i), byte) for i, byte in enumerate(others))
    return table


BYTE_OF_CHARACTER = _byte_of_character()
