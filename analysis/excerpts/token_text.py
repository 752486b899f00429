"""Token ids as text, by the tokenizer that the trace keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...schemas.layout import TOKENIZER
from ..source import Source
from .pieces import Decoding, read_decoding
from .visible import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = f"{TOKENIZER}/tokenizer.json"


class TokenText:
    """Says what a token id stands for; the text is made visible, and is not escaped for HTML."""

    def __init__(self, tokenizer: Tokenizer | None, told: str):
        self._tokenizer = tokenizer
        self.told = told
        """A sentence: by which tokenizer, or why there are ids alone."""
        self._added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._decoding = Decoding() if tokenizer is None else _decoding(tokenizer)
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """[T] the text of each token; a token that the tokenizer does not have is its id in angle brackets."""
        known = self._known
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = self._text(token_id)
        return [known[token_id] for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        piece = None if self._tokenizer is None or token_id < 0 else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return f"\u27e8{token_id}\u27e9"
        # Tokens that were added stand for their own content, whatever the alphabet of the others.
        return visible(piece if token_id in self._added else self._decoding.text(piece))


def read_token_text(source: Source) -> TokenText:
    """The tokenizer of a trace, wherever that lies; where there is none that can be read, ids alone."""
    if not source.store.exists(TOKENIZER):
        return TokenText(None, "Token ids alone: the trace keeps no tokenizer.")
    if not source.store.exists(_FILE):
        return TokenText(None, f"Token ids alone: the tokenizer that the trace keeps has no {_FILE}.")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(source.store.read_bytes(_FILE).decode("utf-8"))
    except Exception as error:  # the library raises nothing more exact
        return TokenText(None, f"Token ids alone: {source.store.shown(_FILE)} cannot be read ({error}).")
    return TokenText(tokenizer, f"Text by the tokenizer that the trace keeps: {_name(source, tokenizer)}.")


def _decoding(tokenizer: Tokenizer) -> Decoding:
    decoder: Any = tokenizer.decoder
    return read_decoding(None if decoder is None else decoder.__getstate__().decode("utf-8"))


def _name(source: Source, tokenizer: Tokenizer) -> str:
    said = next((state.tokenizer for state in source.writers if state.tokenizer), {})
    words = [str(said[key]) for key in ("name", "class") if said.get(key)]
    return ", ".join([*words, f"{tokenizer.get_vocab_size():,} tokens"])
