"""The undamaged traces that tests/fuzz.py damages: small, with several files of every kind."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from builders import add_step, make_batch

RUN = "run"  # Name of the folder of every trace, so that the answers have the same `run`.
DATA = Path(__file__).parent / "data"
VOCABULARY = 50


def build_bases(folder):
    """Make each base at `folder`/<name>/run, unless it is there, and return the names.

    A base is made in a process of its own: one records in children, of which some die of SIGKILL.
    """
    for name in BASES:
        if not (folder / name / "done").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
            subprocess.run([sys.executable, __file__, name, folder / name / RUN], check=True)
            (folder / name / "done").touch()
    return list(BASES)


def make_sealed(path):
    """Three writers that closed, with every optional column, a tokenizer, a loss, replays and sums."""
    for rank in range(3):
        in_child(
            lambda rank=rank: record(path, rank, tokenizer=rank == 0, current=True, replay=rank == 1, older=rank == 2)
        )
    make_sums(path)


def make_journals(path):
    """A writer that closed, one that was killed between steps, one that was killed after one step."""
    in_child(lambda: record(path, 0))
    in_child(lambda: record(path, 1, kill=True, older=True))
    in_child(lambda: record(path, 2, steps=1, kill=True))


def make_dense(path):
    """Captured distributions (top-K on one side, logits on the other) and router choices; one writer was killed."""
    in_child(lambda: record(path, 0, dense=True))
    in_child(lambda: record(path, 1, dense=True, older=True))
    in_child(lambda: record(path, 2, dense=True, kill=True, steps=2))


def make_weights(path):
    """Four versions of the weights, of two writers that each hold a part, in two dtypes."""
    for rank in range(2):
        in_child(lambda rank=rank: record(path, rank, weights=True, older=rank == 1))


def make_attempts(path):
    """A run that was resumed twice: steps 3 and 4 were made again, by other writers."""
    in_child(lambda: record(path, None, steps=4))
    in_child(lambda: record(path, None, first=3, steps=2, resume=True, older=True))
    in_child(lambda: record(path, None, first=4, steps=2, resume=True, kill=True))


def make_blocks(path):
    """Files of several blocks of 256 KiB, and their sums."""
    in_child(lambda: record(path, 0, rows=1000, longest=80, steps=3))
    in_child(lambda: record(path, 1, rows=4, steps=3))
    make_sums(path)


def make_imported(path):
    """What `tim-trace import parquet` writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for step in range(1, 5):
        batch = make_batch(5, seed=step)
        for row in range(5):
            names = {"prompt_ids": "prompt_ids", "response_ids": "response_ids"}
            names |= {"rollout": "rollout_logprobs", "train": "train_logprobs"}
            columns = {name: np.asarray(batch[key][row]).tolist() for key, name in names.items()}
            rows.append({"step": step, "seq_id": f"{step}-{row}", "reward": float(batch["reward"][row]), **columns})
    pq.write_table(pa.Table.from_pylist(rows), path.parent / "dump.parquet")
    tim_trace("import", "parquet", path.parent / "dump.parquet", "-o", path)


BASES = {
    "sealed": make_sealed,
    "journals": make_journals,
    "dense": make_dense,
    "weights": make_weights,
    "attempts": make_attempts,
    "blocks": make_blocks,
    "imported": make_imported,
}


def record(
    path,
    rank,
    *,
    first=1,
    steps=4,
    rows=4,
    longest=6,
    kill=False,
    resume=False,
    tokenizer=False,
    current=False,
    replay=False,
    dense=False,
    weights=False,
    older=False,
):
    """Record some steps as one process of a run; with `kill`, die of SIGKILL with all of it in the journal.

    With `older`, what the trace was after half of the steps is kept beside it.
    """
    from tim_trace.tracer.recorder import Loss, Recorder

    if rank is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    options = {"capture": "logits", "capture_fraction": 1.0} if dense else {}
    recorder = Recorder(path, join=rank is not None, resume=resume, **options)
    draw = np.random.default_rng(100 + (rank or 0))
    names = ["rollout", "train"] + ["current"] * current + ["replay/fp64"] * replay
    for name in names:
        contract = {"engine": "vllm" if name == "rollout" else "trl", "dtype": "float32", "temperature": 1.0}
        if dense and name == "train":
            contract["model"] = {"moe_layers": [0, 1], "num_experts": 4, "experts_per_token": 2}
        recorder.add_contract(name, contract)
    if tokenizer:
        recorder.save_tokenizer(make_tokenizer())
    if not rank:
        recorder.describe(model={"name": "tiny"}, tokenizer={"name": "tiny"})
        recorder.add_hyperparameters({"loss_type": "dapo", "beta": 0.0})
        recorder.add_loss(Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.28))
    for step in range(first, first + steps):
        batch = make_batch(rows, seed=1000 * (rank or 0) + step + 50 * resume, longest=longest)
        batch |= {"current": batch["train"], "replay/fp64": batch["train"]}
        recorded = [name for name in names if not (dense and name in ("rollout", "train"))]
        ids = [f"{rank or 0}-{step}-{row}" for row in range(rows)]
        groups = [f"{rank or 0}-{step}-{row // 2}" for row in range(rows)]
        added = add_step(
            recorder, step, batch, recorded, seq_ids=ids, group_ids=groups, temperature=1.0, finish_reason="stop"
        )
        if dense:
            add_dense(recorder, added, batch, ids, draw)
        if not rank:
            recorder.add_metrics(step, {"loss": 0.5 * step, "grad_norm": 0.25, "note": f"step {step}"})
        if weights:
            recorder.add_weights(step - 1, make_tensors(step, rank))
        if kill:
            recorder.flush()
        if older and step == first + steps // 2:
            recorder.flush(sync=True)
            shutil.copytree(path, path.parent / "older", ignore=shutil.ignore_patterns(".tmp-*"))
    if kill:
        recorder.flush(sync=True)
        os.kill(os.getpid(), signal.SIGKILL)
    recorder.close()


def add_dense(recorder, added, batch, ids, draw):
    """Scores with top-K on the side of the rollout and logits and router choices on the trainer's."""
    from tim_trace.tracer.dense import Logits, TopK
    from tim_trace.tracer.recorder import Routing

    num_tokens = sum(len(row) for row in batch["response_ids"])
    num_all = num_tokens + sum(len(row) for row in batch["prompt_ids"])
    logits = draw.normal(size=(num_tokens, VOCABULARY)).astype(np.float32)
    shifted = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    order = np.argsort(-shifted, axis=1, kind="stable")[:, :5]
    top = np.take_along_axis(shifted, order, 1)
    tail = np.log1p(-np.exp(top).sum(1))
    recorder.add_scores(
        "rollout",
        added,
        logprobs=batch["rollout"],
        captured_rows=list(range(len(ids))),
        distribution=TopK(
            token_ids=order.astype(np.int32), logprobs=top.astype(np.float32), tail_logprob=tail.astype(np.float32)
        ),
    )
    experts = np.argsort(draw.normal(size=(num_all, 2, 4)), axis=2)[:, :, :2].astype(np.int8)
    recorder.add_scores(
        "train",
        added,
        logprobs=batch["train"],
        captured_rows=list(range(len(ids))),
        distribution=Logits(logits=logits),
        routing=Routing(expert_ids=experts, expert_weights=np.full(experts.shape, 0.5, np.float32)),
    )


def make_tensors(step, rank):
    """Weights of one version: a matrix that changes in every version, one that never does, and one in half."""
    import torch

    draw = np.random.default_rng(rank)
    fixed = draw.normal(size=(40, 10)).astype(np.float32)
    moving = (draw.normal(size=(64, 32)) + 0.01 * step).astype(np.float32)
    half = (draw.normal(size=(30,)) * (1 + (step > 2))).astype(np.float16)
    arrays = {"fixed": fixed, "moving": moving, "half": half}
    return {f"layer{rank}.{name}": torch.from_numpy(array) for name, array in arrays.items()}


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)} | {"?": VOCABULARY}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="w0")


def make_sums(path):
    """Have `stats` keep its sums in the trace."""
    tim_trace("stats", path, "--by", "step")


def in_child(work):
    """Run `work` in a process that ends when it does, or that it kills."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the child that records ended with {code}")


def tim_trace(*arguments):
    """Run a command in a child."""

    def work():
        from tim_trace.cli import main

        with contextlib.redirect_stdout(io.StringIO()):
            main([str(argument) for argument in arguments], standalone_mode=False)

    in_child(work)


if __name__ == "__main__":
    BASES[sys.argv[1]](Path(sys.argv[2]))
