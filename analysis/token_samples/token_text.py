"""Decode token ids with the trace's tokenizer, and make invisible characters visible.

Only the vocabulary is read, as data. The tokenizer is never built, so no untrusted regular expression runs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...schemas.checksums import whole_hash
from ...schemas.errors import DamagedTrace
from ...schemas.layout import TOKENIZER
from ...tracer.store import first_line
from ..trace.source import Source

_MOST, _MOST_BY = 10_000, 100
"""Maximum lengths (characters) of a decoded piece and of a replacement, so that an untrusted decoder cannot produce
huge texts."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE characters to bytes: the inverse of bytes_to_unicode in GPT-2's encoder.py.

    Printable Latin-1 bytes stand for themselves. The other bytes are represented by U+0100 and the characters after it.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    byte_level: bool = False
    """Each character stands for a byte (GPT-2, Qwen, Llama 3)."""
    byte_fallback: bool = False
    """A piece such as <0xE2> stands for a byte (SentencePiece)."""
    replaced: tuple[tuple[str, str], ...] = ()
    """(old, new) replacements, applied in order, such as an end-of-word mark and the space it stands for."""
    prefix: str | None = None
    """Prefix of every piece that continues a word (WordPiece)."""
    spaced: bool = False
    """True if every piece is a separate word, as for a tokenizer without a decoder."""

    def text(self, piece: str) -> str:
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
    """Read the decoder from a tokenizer.json. Without a decoder, tokens are joined with spaces.

    Raises KeyError, TypeError, ValueError or AttributeError if the decoder is unknown.
    """
    if decoder is None:
        return Decoding(spaced=True)
    parts = {str(part.get("type")): part for part in _parts(decoder)}
    replaced = [found for part in _parts(decoder) if (found := _replaced(part)) is not None]
    if any(not old or len(new) > _MOST_BY for old, new in replaced):
        raise ValueError("the decoder replaces an empty string, or one of its replacements is too long")
    return Decoding(
        byte_level="ByteLevel" in parts,
        byte_fallback="ByteFallback" in parts,
        replaced=tuple(replaced),
        prefix=str(parts["WordPiece"].get("prefix", "##")) if "WordPiece" in parts else None,
    )


def of_bytes(content: bytes) -> str:
    """Decode UTF-8. The bytes of an incomplete character are shown in hexadecimal, e.g. <0xE2>.

    >>> of_bytes(b"a\\xe2\\x82")
    'a<0xE2><0x82>'
    """
    text = content.decode("utf-8", "surrogateescape")
    return "".join(f"<0x{ord(char) - 0xDC00:02X}>" if 0xDC80 <= ord(char) <= 0xDCFF else char for char in text)


def _bytes(char: str) -> bytes:
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


_FILE = f"{TOKENIZER}/tokenizer.json"
MAX_BYTES = 128 << 20
MAX_PIECE = 1000


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Document(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    pieces: dict[int, str]
    added: dict[int, str]
    """Added tokens by id. Their text needs no decoding."""
    decoding: Decoding

    def __len__(self) -> int:
        return len({*self.pieces.values(), *self.added.values()})


def read_vocabulary(content: bytes) -> Vocabulary:
    try:
        document = msgspec.json.decode(content, type=_Document)
        vocab = document.model.vocab
        items = vocab.items() if isinstance(vocab, dict) else ((piece, place) for place, (piece, _) in enumerate(vocab))
        return Vocabulary(
            pieces={number: piece for piece, number in items},
            added={token.id: token.content for token in document.added_tokens},
            decoding=decoding_of(document.decoder),
        )
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(first_line(error)) from error


class TokenText:
    """Decodes token ids. Invisible characters are made visible; nothing is escaped for HTML."""

    def __init__(self, vocabulary: Vocabulary | None, told: str):
        self._vocabulary = vocabulary
        self.told = told
        """A sentence that names the tokenizer, or says why only ids are shown."""
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        self._known |= {token_id: self._text(token_id) for token_id in {*token_ids} - self._known.keys()}
        return [self._known[token_id] for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        found = self._vocabulary
        whole = None if found is None else found.added.get(token_id, found.pieces.get(token_id))
        if found is None or whole is None:
            return f"\u27e8{token_id}\u27e9"
        piece = whole[:MAX_PIECE]
        text = visible(piece if token_id in found.added else found.decoding.text(piece))
        return text if piece == whole else f"{text}\u2026"


def read_token_text(source: Source) -> TokenText:
    """Read a trace's tokenizer. If it is missing or unreadable, tokens are shown as ids."""
    store = source.store
    try:
        if not store.exists(TOKENIZER):
            return TokenText(None, "Token ids only: the trace has no tokenizer.")
        if not store.exists(_FILE):
            return TokenText(None, f"Token ids only: the trace's tokenizer has no {_FILE}.")
        vocabulary = read_vocabulary(_content(source))
    except (DamagedTrace, ValueError, OSError) as error:
        return TokenText(None, f"Token ids only: {store.shown(_FILE)} is unreadable ({first_line(error)}).")
    said = next((state.tokenizer for state in source.writers if state.tokenizer), {})
    words = [str(said[key]) for key in ("name", "class") if said.get(key)]
    name = ", ".join([*words, f"{len(vocabulary):,} tokens"])
    return TokenText(vocabulary, f"Text decoded with the trace's tokenizer: {name}.")


def _content(source: Source) -> bytes:
    size = source.store.file_size(_FILE)
    if size > MAX_BYTES:
        raise ValueError(f"the file has {size:,} bytes, more than any vocabulary needs")
    content = source.store.read_bytes(_FILE)
    accounts = [state.files[_FILE].hash for state in source.writers if state.files and _FILE in state.files]
    if accounts and whole_hash(content) not in accounts:
        raise ValueError("the file's checksum differs from the recorded one")
    return content


SPACE, TAB, RETURN, NEWLINE = "\u00b7", "\u21e5", "\u240d", "\u21b5\n"
"""Marks that make white space visible. NEWLINE keeps the line break after its mark."""

MOST_MARKS = 4
"""Maximum number of combining marks in a row. More of them would overlap other lines."""

_MARKS = {" ": SPACE, "\t": TAB, "\r": RETURN, "\n": NEWLINE}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
"""Unicode categories to escape: control, format (bidi marks, zero-width), surrogate, private, unassigned,
separators."""
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Blank characters in other categories: joiners, fillers, vowels without a glyph, variation selectors."""


def visible(text: str) -> str:
    """Make every character visible, and keep line breaks.

    Spaces, tabs and newlines become marks. Control, bidi, zero-width, private, unassigned and surrogate code points,
    unusual spaces, variation selectors, and combining marks without a letter before them become U+XXXX in angle
    brackets. Idempotent: visible(visible(x)) == visible(x). HTML is not escaped.

    >>> visible("a b")
    'a\u00b7b'
    >>> ascii(visible("\u202e"))
    "'\\\\u27e8U+202E\\\\u27e9'"
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", SPACE)
    parts: list[str] = []
    marks = MOST_MARKS  # escape a mark at the start of the text, because it has no base letter
    before = ""
    for char in text:
        category = unicodedata.category(char)
        if category[0] == "M" and not _is_blank(char) and marks < MOST_MARKS:
            marks += 1
            parts.append(char)
        elif category[0] == "M" or category in _HIDDEN or _is_blank(char):
            marks = MOST_MARKS
            mark = _MARKS.get(char) or named(ord(char))
            parts.append("\n" if char == "\n" and before == NEWLINE[0] else mark)
        else:
            marks = 0
            parts.append(char)
        before = char
    return "".join(parts)


def named(code: int) -> str:
    """Return a code point as U+XXXX in angle brackets.

    >>> ascii(named(0x200B))
    "'\\\\u27e8U+200B\\\\u27e9'"
    """
    return f"\u27e8U+{code:04X}\u27e9"


def _is_blank(char: str) -> bool:
    return char in _BLANK or "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
