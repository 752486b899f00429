"""What lies at the output: only a trace is replaced, as a whole, and by one process."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from builders import TIM_TRACE, make_trace, run, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.verify import verify
from tim_trace.schemas.errors import ImportFailed, InvalidOption, StorageError, TraceExists
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.index import write_index
from tim_trace.tracer.launch import record
from tim_trace.tracer.recorder import Recorder


def tree(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_file(path, rows=8, last=None):
    lines = [
        {"step": 1 + row // 4, "response_ids": [row % 50], "prompt_ids": [1], "train_logprobs": [-0.5]}
        for row in range(rows)
    ]
    lines += [last] if last else []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replace(how, output, tmp_path):
    if how == "record":
        record(["true"], output=output, force=True)
    elif how == "recorder":
        Recorder(output, force=True).close()
    else:
        import_parquet(rows_file(tmp_path / "rows.jsonl"), output=output, force=True)


@pytest.mark.parametrize("how", ["record", "recorder", "import"])
def test_a_trace_with_an_index_is_replaced(tmp_path, how):
    make_trace(tmp_path / "run")
    write_index(tmp_path / "run")
    before = tree(tmp_path / "run")
    assert any(name.startswith("index/") for name in before)
    replace(how, tmp_path / "run", tmp_path)
    assert not before.keys() & tree(tmp_path / "run").keys() - {"trace.json"}


@pytest.mark.parametrize("how", ["record", "recorder", "import"])
def test_a_folder_of_someone_else_is_kept(tmp_path, how):
    mine = tmp_path / "mine"
    (mine / "checkpoint-4").mkdir(parents=True)
    (mine / "trace.json").write_text('{"traceEvents": [], "displayTimeUnit": "ms"}')
    (mine / "checkpoint-4" / "model.safetensors").write_bytes(b"weights")
    (mine / "notes.txt").write_text("important")
    before = tree(mine)
    with pytest.raises(TraceExists, match="exists but is not a trace, so it was left unchanged"):
        replace(how, mine, tmp_path)
    assert tree(mine) == before


@pytest.mark.parametrize("how", ["record", "recorder", "import"])
@pytest.mark.parametrize("name", ["model.pt", "weights/mine.pt", "scores/copy.csv", ".tmp-mine", "tokenizer/mine.bin"])
def test_a_file_of_someone_else_inside_of_a_trace_is_named_and_kept(tmp_path, how, name):
    make_trace(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).write_bytes(b"mine")
    before = tree(tmp_path / "run")
    with pytest.raises(TraceExists, match=f"contains files that do not belong to a trace \\({name}\\)"):
        replace(how, tmp_path / "run", tmp_path)
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize("how", ["record", "recorder", "import"])
def test_a_link_is_followed_at_the_output_and_named_inside_of_a_trace(tmp_path, how):
    make_trace(tmp_path / "disk" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    replace(how, tmp_path / "link", tmp_path)
    assert (tmp_path / "link").is_symlink()
    assert info(str(tmp_path / "link")).num_sequences == (8 if how == "import" else 0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.pt").write_bytes(b"mine")
    (tmp_path / "disk" / "run" / "dense").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceExists, match=r"do not belong to a trace \(dense\)"):
        replace(how, tmp_path / "link", tmp_path)
    assert (tmp_path / "elsewhere" / "model.pt").exists()
    (tmp_path / "dangling").symlink_to(tmp_path / "new" / "run")
    replace(how, tmp_path / "dangling", tmp_path)
    assert info(str(tmp_path / "new" / "run")).state == "finished"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises((StorageError, TraceExists), match="loop"):
        replace(how, tmp_path / "loop", tmp_path)


def test_a_command_that_cannot_start_leaves_everything_as_it_was(tmp_path):
    make_trace(tmp_path / "run")
    before = tree(tmp_path / "run")
    done = tim_trace("record", "--force", "-o", tmp_path / "run", "--", "pyhton", "x.py")
    assert done.code == 2
    assert "pyhton: no such command" in done.stderr
    assert tree(tmp_path / "run") == before
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "new" / "a" / "b"):
        with pytest.raises(InvalidOption, match="no such command"):
            record(["pyhton"], output=output)
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_an_import_that_finds_a_bad_row_at_last_leaves_the_old_trace(tmp_path):
    make_trace(tmp_path / "run")
    before = tree(tmp_path / "run")
    bad = rows_file(
        tmp_path / "bad.jsonl", 5000, {"step": 9, "response_ids": [1, 2], "prompt_ids": [1], "train_logprobs": [-1.0]}
    )
    with pytest.raises(ImportFailed):
        import_parquet(bad, output=tmp_path / "run", force=True)
    assert tree(tmp_path / "run") == before
    with pytest.raises(ImportFailed):
        import_parquet(bad, output=tmp_path / "new" / "run")
    assert not (tmp_path / "new" / "run").exists()


@pytest.mark.slow
def test_an_import_for_which_the_disk_is_too_small_leaves_the_old_trace(tmp_path):
    make_trace(tmp_path / "run")
    before = tree(tmp_path / "run")
    rows = rows_file(tmp_path / "rows.jsonl", 40_000)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    done = subprocess.run(
        [TIM_TRACE, "import", "parquet", rows, "-o", tmp_path / "run", "--force"], capture_output=True, text=True,
        preexec_fn=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "could not be written" in done.stderr
    assert tree(tmp_path / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_import_that_is_interrupted_leaves_the_old_trace_and_the_next_one_works(tmp_path, name):
    make_trace(tmp_path / "run")
    before = tree(tmp_path / "run")
    rows = rows_file(tmp_path / "rows.jsonl", 60_000)
    command = [TIM_TRACE, "import", "parquet", rows, "-o", tmp_path / "run", "--force"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list((tmp_path / "run").glob(".tmp-new-*/passes/*/*.json")):
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)  # so that it is not done before the signal comes
        # Another process is told that it is being written to, whatever it may replace.
        with pytest.raises(TraceExists, match="another process is writing a trace there"):
            import_parquet(rows_file(tmp_path / "few.jsonl"), output=tmp_path / "run", force=True)
        process.send_signal(getattr(signal, name))
        process.send_signal(signal.SIGCONT)
        process.communicate()
        assert process.returncode != 0
    after = tree(tmp_path / "run")
    assert {file: after[file] for file in after if not file.startswith(".tmp-new-")} == before
    assert (info(str(tmp_path / "run")).num_sequences, verify(str(tmp_path / "run")).is_whole) == (12, True)
    import_parquet(rows_file(tmp_path / "few.jsonl"), output=tmp_path / "run", force=True)
    assert info(str(tmp_path / "run")).num_sequences == 8
    assert not list((tmp_path / "run").glob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["record", "import"])
def test_of_several_that_begin_at_once_one_makes_the_trace(tmp_path, how):
    rows = rows_file(tmp_path / "rows.jsonl", 40)
    program = "import sys, time; print('ran', flush=True); time.sleep(1)"
    command = {
        "record": ["record", "-o", tmp_path / "run", "--", sys.executable, "-c", program],
        "import": ["import", "parquet", rows, "-o", tmp_path / "run"],
    }[how]
    processes = [
        subprocess.Popen([TIM_TRACE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2, 2], told
    for code, (out, err) in zip(codes, told, strict=True):
        assert (
            code == 0 or "a trace already exists there" in err or "another process is writing a trace there" in err
        ), err
        assert out == ("ran\n" if code == 0 and how == "record" else "")
    assert verify(str(tmp_path / "run")).is_whole
    assert info(str(tmp_path / "run")).num_sequences == (40 if how == "import" else 0)


def test_a_trace_that_a_dead_process_left_aside_is_told_and_read_there(tmp_path):
    make_trace(tmp_path / "run")
    aside = tmp_path / "run" / f".tmp-replaced-{'0' * 32}"
    make_trace(aside, steps=2)
    found = info(str(tmp_path / "run"))
    assert (found.num_sequences, info(str(aside)).num_sequences) == (12, 8)
    (sentence,) = found.ignored
    assert sentence.startswith(f"{aside} is a replaced trace, left behind by a process")
    Recorder(tmp_path / "run", force=True).close()
    assert info(str(aside)).num_sequences == 8, "what --force was not asked to replace stays"


def test_what_a_sentence_says_to_do_gets_the_trace_back(tmp_path):
    make_trace(tmp_path / "a run")
    before = tree(tmp_path / "a run")
    moving = tmp_path / "a run" / f".tmp-replacing-{'0' * 32}"
    moving.mkdir()
    for name in ("trace.json", "scores"):  # and then it was killed
        os.rename(tmp_path / "a run" / name, moving / name)
    done = tim_trace("info", tmp_path / "a run")
    assert done.code == 2
    command = done.stderr.strip().rpartition("or run: ")[2]
    assert run("sh", "-c", command).code == 0
    moving.rmdir()
    assert tree(tmp_path / "a run") == before
