"""Decode single vocabulary entries as the tokenizer's own decoder does.

Each token is decoded alone, so bytes of an incomplete character are shown as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST, _MOST_BY = 10_000, 100
"""Maximum length of a piece, and of a replacement within a piece, characters, so that an untrusted decoder cannot produce huge
texts."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the mapping from character to byte in byte-level BPE, the inverse of bytes_to_unicode in GPT-2's encoder.py.

    Printable Latin-1 bytes map to themselves, the others to U+0100 and up.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The settings of a tokenizer's decoder that affect single tokens."""

    byte_level: bool = False
    """True if characters stand for bytes (GPT-2, Qwen, Llama 3)."""
    byte_fallback: bool = False
    """True if <0xE2> stands for a byte (SentencePiece)."""
    replaced: tuple[tuple[str, str], ...] = ()
    """(old, new) text replacements, applied in order; for example, a space replaces a metaspace or an end-of-word mark."""
    prefix: str | None = None
    """Prefix that marks pieces continuing a word (WordPiece); None without one."""
    spaced: bool = False
    """True if every piece is a separate word, as in a tokenizer without a decoder."""

    def text(self, piece: str) -> str:
        """Decode a vocabulary entry."""
        if self.byte_level:
            return of_bytes(b"".join(_bytes(char) for char in piece))
        if self.byte_fallback and (found := _BYTE.fullmatch(piece)):
            return of_bytes(bytes([int(found[1], 16)]))
        for old, new in self.replaced:
            piece = piece.replace(old, new)[:_MOST]
        if self.prefix is not None:
            return piece.removeprefix(self.prefix) if piece.startswith(self.prefix) else f" {piece}"
        return f" {piece}" if self.spaced else piece


def decoding_of(decoder: Mapping[str, Any] | None) -> Decoding:
    """Read the decoder of a tokenizer.json; None joins tokens with spaces.

    Raises KeyError, TypeError, ValueError or AttributeError for anything else.
    """
    if decoder is None:
        return Decoding(spaced=True)
    parts = {str(part.get("type")): part for part in _parts(decoder)}
    replaced = [found for part in _parts(decoder) if (found := _replaced(part)) is not None]
    if any(not old or len(new) > _MOST_BY for old, new in replaced):
        raise ValueError("its decoder replaces an empty string, or has a replacement that is too long")
    return Decoding(
        byte_level="ByteLevel" in parts,
        byte_fallback="ByteFallback" in parts,
        replaced=tuple(replaced),
        prefix=str(parts["WordPiece"].get("prefix", "##")) if "WordPiece" in parts else None,
    )


def of_bytes(content: bytes) -> str:
    """Decode UTF-8; bytes of incomplete characters become <0xE2>.

    >>> of_bytes(b"a\\xe2\\x82")
    'a<0xE2><0x82>'
    """
    text = content.decode("utf-8", "surrogateescape")
    return "".join(f"<0x{ord(char) - 0xDC00:02X}>" if 0xDC80 <= ord(char) <= 0xDCFF else char for char in text)


def _bytes(char: str) -> bytes:
    """Return the byte for a character in the byte alphabet; for any other character, its UTF-8 encoding."""
    return bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode("utf-8", "replace")


def _parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [part for each in decoder["decoders"] for part in _parts(each)]


def _replaced(part: Mapping[str, Any]) -> tuple[str, str] | None:
    if part.get("type") == "Metaspace":
        return str(part.get("replacement", "\u2581")), " "
    if part.get("type") == "BPEDecoder":
        return str(part.get("suffix", "</w>")), " "
    if part.get("type") == "Replace" and "String" in part["pattern"]:
        return str(part["pattern"]["String"]), str(part["content"])
    return None
