"""Single tokens as text: each kind of vocabulary, and what is made visible."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.analysis.token_samples.token_text import decoding_of, visible
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def decoding(decoder):
    return decoding_of(None if decoder is None else json.loads(decoder.__getstate__()))


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(st.text(max_size=20))
def test_byte_level_pieces_are_the_bytes_of_the_text(text):
    tokenizer = byte_level()
    pieces = tokenizer.encode(text).tokens
    shown = [decoding(tokenizer.decoder).text(piece) for piece in pieces]
    assert shown == [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in text.encode()]
    assert decoding(tokenizer.decoder).text("".join(pieces)) == text


def test_a_byte_level_piece_keeps_whole_characters_and_names_the_bytes_of_others():
    of = decoding(decoders.Sequence([decoders.ByteLevel()])).text
    assert of("\u0120hello") == " hello"
    assert of("\u010a") == "\n"
    assert of("\u0120\u00e2\u0124") == " <0xE2><0x82>"  # two of the three bytes of the euro sign
    assert of("\u00e2\u0124\u00ac") == "\u20ac"


LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    ("decoder", "piece", "text"),
    [
        (LLAMA, "\u2581hello", " hello"),
        (LLAMA, "lo", "lo"),
        (LLAMA, "<0x0A>", "\n"),
        (LLAMA, "<0xE2>", "<0xE2>"),
        (decoders.Metaspace(), "\u2581hello", " hello"),
        (decoders.Metaspace(), "<0xE2>", "<0xE2>"),
        (decoders.WordPiece(), "play", " play"),
        (decoders.WordPiece(), "##ing", "ing"),
        (decoders.BPEDecoder(), "hello</w>", "hello "),
        (decoders.Fuse(), "7", "7"),
        (None, "word", " word"),
    ],
)
def test_a_piece_is_what_its_decoder_makes_of_it(decoder, piece, text):
    assert decoding(decoder).text(piece) == text


def test_white_space_stays_visible():
    assert visible("a b\tc\r\n\n") == "a\u00b7b\u21e5c\u240d\u21b5\n\u21b5\n"


@pytest.mark.parametrize(
    "code",
    [
        *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C, *range(0x200B, 0x200E), 0x2060, 0xFEFF,
        0x00, 0x7F, 0x85, 0xAD, 0xA0, 0x2028, 0x3000, 0x3164, 0xFE0F, 0xE0100, 0xE0041, 0xE000, 0xD800, 0x0378,
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_named(code):
    assert visible(f"a{chr(code)}b") == f"a\u27e8U+{code:04X}\u27e9b"


def test_marks_stay_on_their_letter_and_nowhere_else():
    assert visible("e\u0301") == "e\u0301"
    assert visible("\u0301e") == "\u27e8U+0301\u27e9e"
    assert visible("a \u0301") == "a\u00b7\u27e8U+0301\u27e9"
    assert visible("z" + "\u0301" * 6).count("\u0301") == 4


@given(st.text(st.characters(), max_size=30))
def test_nothing_invisible_is_left_and_a_second_time_changes_nothing(text):
    shown = visible(text)
    assert {unicodedata.category(char) for char in shown.replace("\n", "")} <= {
        *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No"),
        *("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"),
    }
    assert visible(shown) == shown
