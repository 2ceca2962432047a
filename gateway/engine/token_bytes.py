"""The bytes that each token stands for, so that decoding is joining. Needs no torch."""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from gateway.engine.model.errors import ModelError

_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`of[id]` is UTF-8, maybe a part of a character; empty for special and unknown tokens."""

    of: list[bytes]
    first_space_drops: bool
    """SentencePiece puts a space before the text, which is not a part of it."""

    @classmethod
    def read(cls, backend: tokenizers.Tokenizer) -> "TokenBytes":
        """Raises ModelError for a decoder that does more than join bytes."""
        parts = _parts(backend)
        kinds = tuple(part["type"] for part in parts)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        of = [b""] * (max(vocabulary.values(), default=-1) + 1)
        if kinds == ("ByteLevel",):
            letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
            for token, i in vocabulary.items():
                of[i] = _spelled(token, letters)
        elif kinds == ("Metaspace",):
            for token, i in vocabulary.items():
                of[i] = token.replace(parts[0]["replacement"], " ").encode()
        elif kinds[:3] == ("Replace", "ByteFallback", "Fuse") and _spaces_only(parts):
            for token, i in vocabulary.items():
                of[i] = _fallback_byte(token) or token.replace(_SPACE, " ").encode()
        else:
            raise ModelError(f"The tokenizer's decoder {'+'.join(kinds)} is not supported.")
        for i, added in backend.get_added_tokens_decoder().items():
            if added.special:
                of[i] = b""
        drops = kinds[-1] == "Strip" or (
            kinds == ("Metaspace",) and parts[0].get("prepend_scheme", "always") != "never"
        )
        return cls(of, drops)

    def join(self, ids: list[int]) -> bytes:
        """The bytes of tokens one after the other; ids outside the vocabulary have none."""
        of = self.of
        return b"".join([of[i] for i in ids if 0 <= i < len(of)])


def _parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _spaces_only(parts: list[dict[str, Any]]) -> bool:
    """Whether the parts turn ▁ into spaces and at most strip one at the beginning."""
    replace, rest = parts[0], parts[3:]
    return (
        (replace["pattern"], replace["content"]) == ({"String": _SPACE}, " ")
        and all(
            (part["type"], part.get("content"), part.get("start"), part.get("stop"))
            == ("Strip", " ", 1, 0)
            for part in rest[:1]
        )
        and len(rest) <= 1
    )


def _byte_letters() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _spelled(token: str, letters: dict[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # an added token, written as text
        return token.encode()


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None
