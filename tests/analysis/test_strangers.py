"""What is said of a trace that a stranger made: nothing that a terminal, a browser or DuckDB acts on."""

import json
import re
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from shared import rest_slow
from tim_trace.analysis.query import sql
from tim_trace.analysis.rows import Rows, printable, shown, to_json, to_text
from tim_trace.analysis.token_samples.token_text import MAX_PIECE, read_token_text, read_vocabulary
from tim_trace.analysis.trace.source import open_source
from tim_trace.cli import main
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tokenizers import Tokenizer, decoders, models

EVIL = (
    "x\x1b[31m\x1b]0;t\x07\x9b2J\u202e\nnext: rm -rf /\r\u2028<script>alert(1)</script><img src=x onerror=alert(1)>"
    "'\"`$(id)\u2066 {x} {{7*7}} [red]%s=1+1 --> ]]>"
)
FAKE = "next: rm -rf"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A run in which every text is hostile."""
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("evil") / "run"
    with Recorder(folder) as recorder:
        recorder.describe(
            model={
                "class": EVIL,
                "name": EVIL,
                "config": {"model_type": EVIL},
                "num_parameters": 3,
                "dtypes": {EVIL: 3},
            },
            tokenizer={"name": EVIL, "class": EVIL},
        )
        for name in ("train", "rollout"):
            contract = dict.fromkeys(
                ("engine", "device", "dtype", "logprobs_of", "logprobs_note", "attention_backend"), EVIL
            )
            model = {"dtypes": {EVIL: 1}, "attention": EVIL, "quantization": EVIL, "adapters": [EVIL]}
            recorder.add_contract(name, contract | {"model": model, "versions": {EVIL: EVIL, "torch": EVIL}})
        recorder.add_contract("reference", {"logprobs_note": EVIL})
        recorder.add_hyperparameters({EVIL: EVIL, "learning_rate": EVIL})
        recorder.add_loss(Loss())
        for step in range(1, 5):
            count, logprobs = 6, [-draw.exponential(1, 5) for _ in range(6)]
            batch = recorder.add_sequences(
                step=step, seq_ids=[f"{EVIL}{step}-{row}" for row in range(count)], prompt_ids=[[1]] * count,
                group_ids=[f"{EVIL}{row % 2}" for row in range(count)], response_ids=draw.integers(0, 9, (count, 5)).tolist(),
                advantage=draw.normal(size=count), reward=draw.random(count), rewards={EVIL: draw.random(count)},
                finish_reason=[EVIL] * count, policy_version=step - 1,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=logprobs)
            near = [np.minimum(values + draw.normal(0, 0.3, 5), 0) for values in logprobs]
            recorder.add_scores("train", batch, logprobs=near)
            recorder.add_metrics(step, {EVIL: EVIL, f"{EVIL}2": 0.5, "loss": 1.0})
    (folder / "tokenizer").mkdir()
    Tokenizer(models.WordLevel({f"{EVIL}{n}": n for n in range(9)}, unk_token=f"{EVIL}0")).save(
        str(folder / "tokenizer" / "tokenizer.json")
    )
    return folder


def called(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def act(text):
    """Characters of a text that a terminal would act on, or that would hide or reorder others."""
    return {char for char in text if char != "\n" and not char.isprintable()}


VERBS = [
    ("info",), ("verify",), ("stats", "--by", "sequence"), ("diagnose",), ("check",), ("objective",), ("dynamics",),
    ("attribute",), ("watch", "--once"), ("corrections",), ("weights",), ("replay",), ("gradient",), ("triangulate",),
]  # fmt: skip
QUERIES = [
    "SELECT name, text FROM metrics",
    "PIVOT (SELECT step, name, text FROM metrics) ON name USING any_value(text) GROUP BY step",
    "SELECT seq_id::INTEGER FROM sequences",
    "SELECT contract_json, engine FROM passes",
    "SELECT error(seq_id) FROM sequences",
]


@pytest.mark.parametrize("arguments", rest_slow([(verb,) for verb in VERBS], 5), ids=lambda arguments: arguments[0])
def test_a_verb_prints_nothing_that_acts_and_no_line_that_is_not_ours(trace, arguments):
    for form in ([], ["--json"]):
        done = called(arguments[0], trace, *arguments[1:], *form)
        assert act(done.stdout + done.stderr) == set()
        assert not [line for line in (done.stdout + done.stderr).split("\n") if line.startswith(FAKE)]
        if form and done.stdout:
            json.loads(done.stdout)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_s_rows_and_errors_print_nothing_that_acts(trace, query):
    for form in ([], ["--json"]):
        done = called("sql", trace, query, *form)
        assert act(done.stdout + done.stderr) == set()
        assert not [line for line in (done.stdout + done.stderr).split("\n") if line.startswith(FAKE)]
        if form and done.exit_code == 0:
            assert json.loads(done.stdout)["rows"]


def test_json_gives_the_text_back_as_it_was():
    for text in (EVIL, "\udc80", "\x7f", "\U000e0041", "\u00e9\U0001f600"):
        assert json.loads(to_json({"a": text, text: 1})) == {"a": text, text: 1}
        assert act(to_json(text)) == set()
    assert to_json("\u00e9\U0001f600") == '"\u00e9\U0001f600"'


def test_a_text_is_printable_and_what_was_printable_stays():
    assert printable(EVIL).isprintable()
    assert printable("\u202e\x1b\U000e0041\u00e9") == "\\u202e\\x1b\\U000e0041\u00e9"
    assert to_text(Rows(("a\x1b", "b\n"), [("\x07", "\n"), ("c", "d")])).split("\n")[0].split() == ["a\\x1b", "b\\x0a"]
    read, printed = ({f"a{end}": [f"b{end}", (f"c{end}", 1.5)]} for end in ("\n", "\\x0a"))
    assert shown(Rows(("d\n",), [(read,)])) == Rows(("d\\x0a",), [(printed,)])


def test_csv_is_as_recorded_in_a_pipe_and_says_so_of_formulas(trace):
    assert EVIL[:5] in called("sql", trace, "SELECT any_value(seq_id) FROM sequences", "--csv").stdout
    for verb in ("sql", "query", "stats", "corrections", "weights"):
        assert "a spreadsheet may run it as a formula" in re.sub(r"\s+", " ", called(verb, "--help").stdout)


class Tags(HTMLParser):
    """Counts the tags of a page, and the attributes that would run something."""

    def __init__(self):
        super().__init__()
        self.tags, self.handlers = {}, []

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.handlers += [name for name, value in attributes if name.startswith("on") or "javascript:" in (value or "")]


@pytest.mark.slow
def test_a_report_of_hostile_text_has_the_tags_of_ours_alone(trace, tmp_path):
    done = called("report", trace, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.stderr
    assert act(done.stdout + done.stderr) == set()
    page = (tmp_path / "page.html").read_text()
    found = Tags()
    found.feed(page)
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert found.handlers == []
    assert found.tags.get("img", 0) == 0


@pytest.mark.parametrize(
    "name", ["x'; DROP VIEW tokens; --", 'a"b', "$(id)", "%00", "a\nb", "\udcff", "\u202e", "x" * 200]
)
def test_a_run_of_any_name_is_a_value(tmp_path, name):
    with Recorder(tmp_path / "plain") as recorder:
        recorder.add_sequences(step=1, seq_ids=["\0'\""], response_ids=[[1]])
    (tmp_path / "plain").rename(tmp_path / name)
    assert sql(tmp_path / name, "SELECT count(*), count(DISTINCT run) FROM sequences").rows == [(1, 1)]
    done = called("info", tmp_path / name)
    assert done.exit_code == 0
    assert act(done.stdout) == set()


# Tokenizers


def document(**changes):
    return json.dumps(
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": [], "decoder": None} | changes
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None}, {"model": {}}, {"model": {"vocab": 7}}, {"model": {"vocab": {"a": "x"}}}, {"model": {"vocab": [["a"]]}},
        {"model": {"vocab": {"a": 1e300}}}, {"added_tokens": 7}, {"added_tokens": [{"id": "x", "content": "a"}]}, {"decoder": 7},
        {"decoder": {"type": "Sequence"}}, {"decoder": {"type": "Sequence", "decoders": 7}}, {"decoder": {"type": "Replace"}},
        {"decoder": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
        {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 101}},
    ],
)  # fmt: skip
def test_a_tokenizer_of_other_types_is_none(changes):
    with pytest.raises(ValueError, match=r"."):
        read_vocabulary(document(**changes).encode())


def test_a_deep_tokenizer_is_none():
    with pytest.raises(ValueError, match=r"."):
        read_vocabulary(document().replace("null", '{"type":"Sequence","decoders":[' * 5000 + "]}" * 5000).encode())


def test_no_expression_of_a_tokenizer_runs(tmp_path, monkeypatch):
    """A normalizer that backtracks for ever, on a token that the library would normalize: the vocabulary is read as data."""
    evil = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    token = {"id": 2, "content": "a" * 60 + "!", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}  # fmt: skip
    found = read_vocabulary(document(normalizer=evil, added_tokens=[token]).encode())
    assert found.added == {2: "a" * 60 + "!"}


def test_pieces_do_not_grow():
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    found = read_vocabulary(document(decoder={"type": "Sequence", "decoders": [doubling] * 60}).encode())
    assert len(found.decoding.text("a" * MAX_PIECE)) <= 10_000


def test_a_vocabulary_is_that_of_the_library():
    models_of = [
        models.WordLevel({"a": 0, "b": 5}, unk_token="a"), models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
        models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0), models.WordPiece({"a": 0, "##b": 1}, unk_token="a"),
    ]  # fmt: skip
    for model in models_of:
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback()])
        tokenizer.add_tokens(["<one>"])
        tokenizer.add_special_tokens(["<two>", "a"])
        found = read_vocabulary(tokenizer.to_str().encode())
        assert len(found) == tokenizer.get_vocab_size()
        for number in range(10):
            assert found.added.get(number, found.pieces.get(number)) == tokenizer.id_to_token(number)


def test_a_tokenizer_that_is_not_what_was_written_leaves_ids(tmp_path):
    from forged import change_document
    from tim_trace.schemas.checksums import sealed

    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1]])
    path = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(document())
    (state,) = (tmp_path / "run" / "writers").iterdir()
    own = sealed(path.read_bytes())
    account = {"num_bytes": own.num_bytes, "hash": own.hash}
    change_document(state, lambda values: values["files"].update({"tokenizer/tokenizer.json": account}))
    assert read_token_text(open_source(str(tmp_path / "run"))).of([1]) == ["\u00b7b"]
    path.write_text(document().replace('"b"', '"c"'))
    text = read_token_text(open_source(str(tmp_path / "run")))
    assert text.of([1]) == ["\u27e81\u27e9"]
    assert "differs from the recorded one" in text.told
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes, more than any vocabulary" in read_token_text(open_source(str(tmp_path / "run"))).told
