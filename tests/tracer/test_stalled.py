"""A file system that stops answering: training goes on within the bound, and nobody believes that rows are safe."""

import sys
import threading
import time

import pytest
from builders import PROGRAMS, add_step, make_batch, run, tim_trace
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer import patience
from tim_trace.tracer.recorder import Recorder

PLENTY_S = 240.0


@pytest.mark.parametrize("case", rest_slow(["add", "weights", "session", "sync", "close", "open", "exit"], 3))
def test_no_call_waits_longer_than_the_bound_for_a_file_system_that_does_not_answer(tmp_path, case):
    done = run(sys.executable, PROGRAMS / "stalled.py", tmp_path / "run", case, timeout=PLENTY_S)
    assert done.code == 0, done.stderr
    answer, seconds = done.stdout.split()
    assert answer == "True"
    assert float(seconds) < 30.0, "each waits 2 s at most, on a busy machine, too"
    if case != "open":
        assert done.stderr.count("RECORDING STOPPED") == 1, done.stderr
        assert "did not respond within 2 s (file system " in done.stderr


@pytest.mark.parametrize("case", rest_slow(["record-begin", "record-sign", "record-end"]))
def test_a_command_is_started_and_ends_where_tim_trace_record_waits_for_a_file_system(tmp_path, case):
    path = tmp_path / "run"
    done = run(sys.executable, PROGRAMS / "stalled.py", path, case, timeout=PLENTY_S)
    assert done.code == 3, done.stderr
    assert (tmp_path / "run-started").exists()
    *before, sentence = [
        line for line in done.stderr.splitlines() if "did not respond within 2 s (file system " in line
    ]
    assert sentence == done.stderr.splitlines()[-1]
    if case == "record-begin":
        assert all(line.startswith("tim-trace: NOT RECORDED") for line in (*before, sentence)), done.stderr
        return
    assert not before
    assert f"`tim-trace compact {path}`" in sentence
    assert list((path / "journal").glob("*.arrows"))
    finished = tim_trace("compact", path)
    assert finished.code == 0, finished.stderr
    found = info(str(path))
    assert (found.num_sequences, found.damaged, (path / "journal").exists()) == (4, (), False)


def held(recorder, monkeypatch):
    """Have the recorder's thread wait in the middle of a record until the gate is set."""
    gate, inside = threading.Event(), threading.Event()
    append = recorder.writer.segments.append

    def wait(*args):
        inside.set()
        gate.wait(PLENTY_S)
        append(*args)

    monkeypatch.setattr(recorder.writer.segments, "append", wait)
    return gate, inside


def test_the_wait_counts_while_it_lasts_and_is_in_the_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(patience, "_TELLS_EVERY_S", 0.2)
    recorder = Recorder(tmp_path / "run", queue_bytes=1)
    gate, _ = held(recorder, monkeypatch)
    training = threading.Thread(target=lambda: [add_step(recorder, step, make_batch()) for step in (1, 2, 3)])
    training.start()
    deadline = time.monotonic() + PLENTY_S
    while info(str(tmp_path / "run")).writers[0].waited_s < 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert info(str(tmp_path / "run")).writers[0].waited_s >= 0.5
    assert recorder.waited_s >= 0.5
    assert training.is_alive()
    gate.set()
    training.join()
    assert recorder.close() is True
    said = capsys.readouterr().err
    assert f"tim-trace: waiting for {tmp_path / 'run'} (file system " in said
    assert "this process gives up after 60 s" in said


def test_what_was_left_behind_is_finished_when_the_file_system_answers_again(tmp_path, monkeypatch, capsys):
    recorder = Recorder(tmp_path / "run", queue_bytes=1, max_wait=1.0)
    add_step(recorder, 1, make_batch())
    assert recorder.flush() is True
    gate, inside = held(recorder, monkeypatch)
    add_step(recorder, 2, make_batch())
    assert inside.wait(PLENTY_S)
    assert recorder.flush() is False
    recorder.writer._beside.join(PLENTY_S)
    found = info(str(tmp_path / "run"))
    assert (found.state, found.num_sequences) == ("stopped", 4), "it is marked at once, since only that record waits"
    gate.set()
    recorder.writer._worker._thread.join(PLENTY_S)
    found = info(str(tmp_path / "run"))
    assert found.state == "stopped"
    assert any("did not respond within 1 s" in sentence for sentence in found.missing)
    assert recorder.close() is False
    assert capsys.readouterr().err.count("stopped recording earlier") == 2


def test_weights_that_take_longer_than_the_bound_are_waited_for_while_work_goes_on(tmp_path, monkeypatch):
    import torch

    recorder = Recorder(tmp_path / "run", max_wait=1.0)
    recorder.add_weights(0, {"model": torch.zeros(10)})
    recorder.flush()
    write, started = recorder.writer._weights._write, threading.Event()

    def slow(*args):
        started.set()
        end = time.thread_time() + 2.5
        while time.thread_time() < end:
            sum(range(1000))
        write(*args)

    monkeypatch.setattr(recorder.writer._weights, "_write", slow)
    recorder.add_weights(1, {"model": torch.ones(10)})
    assert started.wait(PLENTY_S)
    begin = time.monotonic()
    assert recorder.flush(weights=False) is True, "rows are waited for, and not the weights"
    assert recorder.writer._weights._worker.is_busy
    assert time.monotonic() - begin < 60
    recorder.add_weights(2, {"model": torch.full((10,), 2.0)})
    assert recorder.close() is True
    assert info(str(tmp_path / "run")).state == "finished"


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_bound_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(InvalidOption, match=r"max_wait: got .*; pass a number of seconds above 0"):
        Recorder(tmp_path / "run", max_wait=value)
    assert not (tmp_path / "run").exists()
