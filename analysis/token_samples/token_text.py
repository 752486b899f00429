"""Decode token ids with the tokenizer in the trace.

Only the tokenizer's vocabulary is read, as data. The tokenizer is never built, so untrusted regular expressions and
normalizers never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...schemas.checksums import whole_hash
from ...schemas.errors import DamagedTrace
from ...schemas.layout import TOKENIZER
from ...tracer.store import first_line
from ..trace.source import Source
from .pieces import Decoding, decoding_of
from .visible import visible

_FILE = f"{TOKENIZER}/tokenizer.json"
MAX_BYTES = 128 << 20
"""Maximum size of tokenizer.json, bytes; several times the size of the largest known file."""
MAX_PIECE = 1000
"""Maximum number of characters shown per token."""


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Piece -> id; for Unigram, pieces with their log-probabilities in the order of ids."""


class _Document(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens defined in a tokenizer.json."""

    pieces: dict[int, str]
    added: dict[int, str]
    """Id of an added token -> its content, which is used without decoding."""
    decoding: Decoding

    def __len__(self) -> int:
        return len({*self.pieces.values(), *self.added.values()})


def read_vocabulary(content: bytes) -> Vocabulary:
    """Read a tokenizer.json. Raises ValueError for anything else."""
    try:
        document = msgspec.json.decode(content, type=_Document)
        vocab = document.model.vocab
        pieces = (
            {number: piece for piece, number in vocab.items()}
            if isinstance(vocab, dict)
            else {number: piece for number, (piece, _) in enumerate(vocab)}
        )
        return Vocabulary(
            pieces=pieces,
            added={token.id: token.content for token in document.added_tokens},
            decoding=decoding_of(document.decoder),
        )
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(first_line(error)) from error


class TokenText:
    """Decoder from token ids to visible text, which is not escaped for HTML."""

    def __init__(self, vocabulary: Vocabulary | None, told: str):
        self._vocabulary = vocabulary
        self.told = told
        """Sentence that names the tokenizer, or explains why only ids are shown."""
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; an id missing from the vocabulary is shown in angle brackets."""
        known = self._known
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = self._text(token_id)
        return [known[token_id] for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        found = self._vocabulary
        if found is not None and token_id in found.added:
            return _shortened(visible(found.added[token_id][:MAX_PIECE]), found.added[token_id])
        if found is not None and token_id in found.pieces:
            piece = found.pieces[token_id]
            return _shortened(visible(found.decoding.text(piece[:MAX_PIECE])), piece)
        return f"\u27e8{token_id}\u27e9"


def read_token_text(source: Source) -> TokenText:
    """Read the tokenizer from a local or remote trace; if it is missing or unreadable, tokens are shown as ids."""
    store = source.store
    try:
        if not store.exists(TOKENIZER):
            return TokenText(None, "Token ids only: the trace has no tokenizer.")
        if not store.exists(_FILE):
            return TokenText(None, f"Token ids only: the trace's tokenizer has no {_FILE}.")
        vocabulary = read_vocabulary(_content(source))
    except (DamagedTrace, ValueError, OSError) as error:
        return TokenText(None, f"Token ids only: {store.shown(_FILE)} cannot be read ({first_line(error)}).")
    return TokenText(vocabulary, f"Text decoded with the trace's tokenizer: {_name(source, vocabulary)}.")


def _content(source: Source) -> bytes:
    """Read tokenizer.json, and verify the content against the recorded checksum, if any. Raises ValueError."""
    size = source.store.file_size(_FILE)
    if size > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than any vocabulary")
    content = source.store.read_bytes(_FILE)
    accounts = [state.files[_FILE].hash for state in source.writers if state.files and _FILE in state.files]
    if accounts and whole_hash(content) not in accounts:
        raise ValueError("its checksum differs from the recorded one")
    return content


def _shortened(text: str, whole: str) -> str:
    return text if len(whole) <= MAX_PIECE else f"{text}\u2026"


def _name(source: Source, vocabulary: Vocabulary) -> str:
    said = next((state.tokenizer for state in source.writers if state.tokenizer), {})
    words = [str(said[key]) for key in ("name", "class") if said.get(key)]
    return ", ".join([*words, f"{len(vocabulary):,} tokens"])
