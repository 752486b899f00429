"""Measure on a GPU: copies, digests, dtypes, attention kernels, the exact engine, locate, vLLM, and speed.

    python benchmarks/gpu.py                     # every part on the GPU; `make bench-gpu` does this
    python benchmarks/gpu.py --quick             # small shapes and few arms, within eight minutes; also on a CPU
    python benchmarks/gpu.py --parts replay --arms dtype=bf16 dtype=fp16 --limit 540 --results out/gpu.jsonl

Needs torch and transformers; a part that needs vLLM says so in its rows. Each row is appended to the results file as soon as it
is measured, and the page is written anew: a run that is cut off loses nothing. Rows that the results file already has are not
measured again, so several short runs on borrowed machines make one page. Models have random weights: noise depends on a model's
shapes and scales, so these figures are of this model; speeds are those of its size.
"""

import argparse
import copy
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
from comparison import ratios
from replaying import copy_of, record_steps
from tim_trace.replay.backends.kernels import KERNELS

SIZES = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "0.1b": {
        "vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
SHAPES = {"tiny": (8, 16, 24), "0.1b": (16, 64, 128), "0.6b": (64, 128, 384)}
"""Number of sequences, prompt tokens and response tokens of step 1."""
SMALL = {"tiny": (4, 8), "0.1b": (4, 32), "0.6b": (4, 64)}
"""Number of sequences and response tokens of step 2, on which slow arms run; its prompts have the same length."""
ROWS = 8

ARMS = {
    **dict.fromkeys(("dtype=fp32", "dtype=tf32", "dtype=bf16", "dtype=fp16", "dtype=bf16,lm-head=fp32"), "1"),
    **dict.fromkeys((f"dtype=bf16,attention={kernel}" for kernel in KERNELS), "1"),
    **dict.fromkeys(("dtype=bf16,batch-size=1", "dtype=bf16,padding=packed", "dtype=bf16,deterministic=true"), "1"),
    **dict.fromkeys(("dtype=bf16,quantize=int8", "dtype=bf16,quantize=fp8"), "1"),
    **dict.fromkeys(("dtype=bf16,mode=decode", "dtype=bf16,compile=true", "engine=exact,dtype=bf16"), "2"),
    "engine=exact,dtype=bf16,batch-size=1,mode=decode": "2",
    **dict.fromkeys(("engine=vllm,dtype=bf16", "engine=vllm,dtype=bf16,mode=decode"), "2"),
}
"""The step on which each arm runs."""
QUICK_ARMS = (
    "dtype=fp32", "dtype=bf16", "dtype=fp16", "dtype=bf16,attention=eager", "dtype=bf16,attention=math",
    "dtype=bf16,attention=flash", "dtype=bf16,batch-size=1", "dtype=bf16,padding=packed", "engine=exact,dtype=bf16",
)  # fmt: skip
REFERENCE, BASE = "dtype=fp64", "dtype=bf16"

ENGINES = {
    "CUDA graphs, batches of 64": {},
    "no graphs, batches of 64": {"enforce_eager": True},
    "no graphs, one sequence at a time": {"enforce_eager": True, "max_num_seqs": 1},
    "batch invariant, batches of 64": {"invariant": True},
    "batch invariant, one sequence at a time": {"invariant": True, "max_num_seqs": 1},
}
"""Settings under which vLLM samples greedily, so that sequences diverge only if bits differ."""

BATCH, TOKENS, ROUNDS, REPEATS = 64, 512, 12, 9
RESULTS = Path(__file__).parents[1] / "runs" / "gpu.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "gpu.md"


WITHOUT_NETWORK = """\
On an offline machine that has torch, transformers and the wheels tim-trace needs (duckdb, numcodecs, pytz, zarr, msgspec,
google-crc32c, donfig, rich), make the clone importable as `tim_trace` through a symlink, and run the benchmark in
stages. Each row is saved as soon as it is measured, and the next run measures only the missing rows:

    mkdir p && ln -s "$PWD" p/tim_trace && export PYTHONPATH="$PWD/p"
    python -m pytest -m gpu
    python benchmarks/gpu.py --quick --results out/gpu.jsonl
    python benchmarks/gpu.py --parts recording replay --limit 540 --results out/gpu.jsonl
"""


class OutOfTime(BaseException):
    """The time limit has passed. Handlers of `Exception` do not mistake it for a failed row."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.add_argument("--model", choices=tuple(SIZES), help="default: 0.6b; 0.1b with --quick; tiny on a CPU")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms of the part `replay` (default: all)")
    parser.add_argument("--quick", action="store_true", help="few arms and small shapes; --limit 450 unless given")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after this time and list what was not run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one per measured row")
    parser.add_argument(
        "-o", "--output", type=Path, help=f"the page (default: {PAGE.name}, beside the results with --quick)"
    )
    parser.add_argument("--sample", nargs=2, metavar=("FOLDER", "OPTIONS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        _sample(*arguments.sample)
        return
    arguments.device = arguments.device or ("cuda" if _has_cuda() else "cpu")
    if arguments.device == "cpu" and not arguments.quick and arguments.model is None:
        parser.error("no CUDA device found; --quick measures small shapes on a CPU")
    arguments.model = arguments.model or (
        "tiny" if arguments.device == "cpu" else "0.1b" if arguments.quick else "0.6b"
    )
    arguments.limit = arguments.limit or (450 if arguments.quick else None)
    arguments.arms = arguments.arms or list(QUICK_ARMS if arguments.quick else ARMS)
    arguments.output = arguments.output or (arguments.results.with_suffix(".md") if arguments.quick else PAGE)
    with tempfile.TemporaryDirectory() as room:
        _run(arguments, Path(room))


def _run(arguments, room):
    """Measure the rows missing from the results file, until the limit."""
    results, machine = _read(arguments.results), _machine(arguments)
    done = {(row["part"], row["row"]) for row in results if row["machine"] == machine}
    wanted = [
        (part, name, measure)
        for part in arguments.parts
        for name, measure in PARTS[part](arguments, room)
        if (part, name) not in done
    ]
    if arguments.limit:
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, arguments.limit)
    while wanted:
        part, name, measure = wanted[0]
        print(f"{part}: {name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            row = {"cells": measure()}
        except OutOfTime:
            break
        except Exception as error:  # a missing kernel is a result
            row = {"why": _line(error)}
        row = {"machine": machine, "part": part, "row": name, "seconds": time.perf_counter() - start} | row
        results.append(row)
        wanted.pop(0)
        with suppress(OutOfTime):  # if it was raised during the write, the next row sees it
            _append(arguments.results, row)
            arguments.output.write_text(_page(results, wanted), encoding="utf-8")
    signal.setitimer(signal.ITIMER_REAL, 0)
    arguments.output.write_text(_page(results, wanted), encoding="utf-8")
    print(f"wrote {arguments.output}; rows in {arguments.results}; {len(wanted)} not run", file=sys.stderr)


def _stop(*_):
    signal.setitimer(signal.ITIMER_REAL, 1)  # again, in case something swallows this one
    raise OutOfTime


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path, row):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _page(results, wanted):
    """Return the page of all results, by machine and part."""
    parts = [
        "# On a GPU\n\nThis page shows measurements on a GPU. `make bench-gpu` repeats them and rewrites the page.\n",
        WITHOUT_NETWORK,
    ]
    for machine in dict.fromkeys(row["machine"] for row in results):
        rows = [row for row in results if row["machine"] == machine]
        parts.append(f"Measured on {machine}\n")
        for part, rows_of in PARTS.items():
            measured = [row for row in rows if row["part"] == part]
            if measured:
                title, _, lead = rows_of.__doc__.partition("\n\n")
                lead = "\n".join(line.strip() for line in lead.strip().splitlines())
                parts.append(f"## {title.rstrip('.')}\n\n{lead}\n\n{_table(measured)}")
    if wanted:
        parts.append("Not run, for lack of time: " + ", ".join(f"{part} `{name}`" for part, name, _ in wanted) + ".\n")
    return "\n".join(parts)


def _table(rows):
    columns = list(dict.fromkeys(name for row in rows for name in row.get("cells", {}))) or ["result"]
    lines = [["", "seconds", *columns], ["---"] * (len(columns) + 2)]
    for row in rows:
        cells = row.get("cells") or {columns[0]: f"not run: {row['why']}"}
        lines.append([f"`{row['row']}`", f"{row['seconds']:.1f}", *(cells.get(column, "") for column in columns)])
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _has_cuda():
    import torch

    return torch.cuda.is_available()


def _machine(arguments):
    import torch

    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    cuda = f", CUDA {torch.version.cuda}" if arguments.device == "cuda" else ""
    return (
        f"{where}; torch {torch.__version__}{cuda}; a Qwen3 of the size {arguments.model} with random bfloat16 weights."
    )


def _line(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _middle(values, form):
    return {"median": f"{statistics.median(values):{form}}", "range": f"{min(values):{form}} to {max(values):{form}}"}


@cache
def _model(size):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES[size], dtype="bfloat16")).eval()
    for parameter in model.parameters():  # the rotary's frequencies stay in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _sequences(size):
    """Return the token ids of both steps' sequences."""
    vocab, prompt = SIZES[size]["vocab_size"], SHAPES[size][1]
    shapes = ((SHAPES[size][0], SHAPES[size][2]), SMALL[size])
    return [
        list(np.random.default_rng(seed).integers(0, vocab, (count, prompt + response)))
        for seed, (count, response) in enumerate(shapes)
    ]


@cache
def _trace(size, room, device):
    """Record a trace of the model and its two steps, scored on the device by a bare loop."""
    steps, prompt = _sequences(size), SHAPES[size][1]
    logprobs = [_scores(_model(size).to(device), sequences, prompt) for sequences in steps]
    record_steps(room / "run", _model(size).to("cpu"), steps, prompt, ROWS, logprobs)
    return room / "run"


def _scores(model, sequences, prompt):
    """Return the responses' logprobs as in a trainer: a forward, then the chosen logit minus logsumexp in float32."""
    import torch

    found = []
    for start in range(0, len(sequences), ROWS):
        ids_BW = torch.from_numpy(np.stack(sequences[start : start + ROWS])).to(model.device)
        with torch.no_grad():
            logits_BTV = model(ids_BW, logits_to_keep=ids_BW.shape[1] - prompt + 1).logits[:, :-1].float()
            chosen_BT = logits_BTV.gather(-1, ids_BW[:, prompt:, None]).squeeze(-1)
            found.extend((chosen_BT - logits_BTV.logsumexp(-1)).cpu().numpy())
    return found


def _recording(arguments, room):
    """Recording from the device.

    Training steps (forward, backward and AdamW, eight rows at a time) run alternately with and without a recorder; the
    table shows the ratio of their times. Other rows show how long the recorder's calls take on the training
    thread, and how long digests, weights and optimizer statistics take for the whole model. The first two versions of
    the weights take longer, because their memory is touched for the first time.
    """
    return [
        ("a training step alone, ms", partial(_step, arguments, room, "alone")),
        (
            "a training step with tokens, metrics and optimizer recorded, relative to one without recording",
            partial(_step, arguments, room, "tokens"),
        ),
        ("the same, with all weights recorded at each step", partial(_step, arguments, room, "weights")),
        ("recording a step's tokens, ns per token on the training thread", partial(_step, arguments, room, "calls")),
        (
            "recorded tokens that changed when the values were overwritten right after the call",
            partial(_overwritten, arguments, room),
        ),
        ("digests of the model, ms", partial(_digests, arguments)),
        (
            "add_weights, first two versions, ms on the training thread",
            partial(_weights, arguments, room, slice(2)),
        ),
        (
            "add_weights, later versions, ms on the training thread",
            partial(_weights, arguments, room, slice(2, None)),
        ),
        ("add_optimizer, ms", partial(_optimizer, arguments, room)),
    ]


@cache
def _trained(size, device, room):
    """Return seconds of steps alone, with tokens and with weights recorded; and ns per token of the token calls."""
    import torch
    from tim_trace.tracer.recorder import Recorder

    prompt = SHAPES[size][1]
    rows = np.stack(_sequences(size)[0])
    model = copy.deepcopy(_model(size)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def train():
        found = []
        for ids_BW in torch.from_numpy(rows).to(device).split(ROWS):
            logits_BTV = model(ids_BW, logits_to_keep=ids_BW.shape[1] - prompt + 1).logits[:, :-1]
            logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BW[:, prompt:, None]).squeeze(-1)
            (-logprobs_BT.mean() / len(rows) * ROWS).backward()
            found.append(logprobs_BT.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat(found)

    def timed(record=None):
        logprobs_BT = train()
        start = time.perf_counter()
        taken = record(logprobs_BT) if record else None
        logprobs_BT.sum().item()  # waits for the device, as logging a loss does
        return taken or time.perf_counter() - start

    steps = iter(range(1, 1000))

    def tokens(recorder, logprobs_BT):
        step, start = next(steps), time.perf_counter()
        batch = recorder.add_sequences(step=step, prompt_ids=rows[:, :prompt], response_ids=rows[:, prompt:])
        for name in ("train", "rollout"):
            recorder.add_scores(name, batch, logprobs=logprobs_BT)
        calls.append((time.perf_counter() - start) / (2 * logprobs_BT.numel()) * 1e9)
        recorder.add_metrics(step, {"loss": -logprobs_BT.mean()})
        recorder.add_optimizer(step, optimizer)
        return step

    def everything(recorder, logprobs_BT):
        recorder.add_weights(tokens(recorder, logprobs_BT), model.state_dict())

    calls, taken = [], ([], [], [])
    with Recorder(room / "tokens") as first, Recorder(room / "everything") as second:
        for _ in range(ROUNDS):
            for seconds, record in zip(taken, (None, partial(tokens, first), partial(everything, second)), strict=True):
                seconds.append(_seconds(lambda record=record: timed(record)))
    return [seconds[2:] for seconds in taken] + [calls[4:]]


def _step(arguments, room, which):
    alone, with_tokens, with_weights, calls = _trained(arguments.model, arguments.device, room)
    if which in ("alone", "calls"):
        return _middle(calls if which == "calls" else [1e3 * seconds for seconds in alone], ".1f")
    return _middle(ratios(with_tokens if which == "tokens" else with_weights, alone), ".3f")


def _overwritten(arguments, room):
    import torch
    from tim_trace.analysis.views import open_database
    from tim_trace.tracer.recorder import Recorder

    logprobs = -torch.rand(BATCH, TOKENS, device=arguments.device)
    given = logprobs.to("cpu", copy=True)
    with Recorder(room / "overwritten") as recorder:
        for step in range(1, 9):
            batch = recorder.add_sequences(
                step=step, seq_ids=range(BATCH), response_ids=torch.zeros(BATCH, TOKENS).int()
            )
            recorder.add_scores("train", batch, logprobs=logprobs)
            logprobs.fill_(0)
            logprobs.copy_(given, non_blocking=True)
    query = "SELECT logprobs FROM scores ORDER BY step, seq_id::INT"
    rows = np.array([row for (row,) in open_database(room / "overwritten").ask(query).rows], np.float32)
    wrong = int((rows.reshape(8, BATCH, TOKENS) != given.numpy()).sum())
    return {"median": f"{wrong} of {rows.size:,}"}


def _repeated(device, function):
    """Return the milliseconds of five calls after a warm-up, each including the device's remaining work."""
    import torch

    def call():
        function()
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    return _middle([_seconds(call) * 1e3 for _ in range(5)], ".1f")


def _digests(arguments):
    from tim_trace.tracer.weights.digests import digest

    model = _model(arguments.model).to(arguments.device)
    return _repeated(arguments.device, lambda: [digest(tensor) for tensor in model.state_dict().values()])


@cache
def _taken_by_weights(size, device, room):
    import torch
    from tim_trace.tracer.recorder import Recorder

    # A copy, because training changes it and the other parts measure the initial model.
    state = copy.deepcopy(_model(size)).to(device).state_dict()
    taken = []
    with Recorder(room / "weights") as recorder:
        for version in range(8):
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(_seconds(partial(recorder.add_weights, version, state)) * 1e3)
            recorder.flush()
            next(iter(state.values())).add_(1e-3)
    return taken


def _weights(arguments, room, which):
    return _middle(_taken_by_weights(arguments.model, arguments.device, room)[which], ".1f")


def _optimizer(arguments, room):
    import torch
    from tim_trace.tracer.recorder import Recorder

    parameters = [
        value.detach().clone().to(arguments.device).requires_grad_() for value in _model(arguments.model).parameters()
    ]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    steps = iter(range(1, 10))
    with Recorder(room / "optimizer") as recorder:
        return _repeated(arguments.device, lambda: recorder.add_optimizer(next(steps), optimizer))


def _replay(arguments, room):
    """Arms of a replay.

    d is the difference from the arm `dtype=fp64` on the same device, in nats. *equal* is the share of tokens that match
    the arm `dtype=bf16` bit for bit. In the first row, the reference for both is a bare loop, which computes logsumexp
    over the whole batch at once. *replay s* includes loading the model and writing the results. Decode, compile, the
    exact engine and vLLM score only four short sequences.
    """
    return [
        ("as recorded, compared with the bare loop", partial(_identity, arguments, room)),
        *((arm, partial(_arm, arguments, room, arm)) for arm in arguments.arms),
    ]


def _identity(arguments, room):
    from tim_trace.analysis.views import open_database
    from tim_trace.replay.engine import replay

    trace = _trace(arguments.model, room, arguments.device)
    took = _seconds(lambda: replay(trace, steps="1"))
    query = "SELECT count(*), avg(abs(d)), sqrt(avg(d * d)), max(abs(d)), avg((d = 0)::INT) FROM pair('replay/as-recorded', 'train')"
    return _cells(took, *open_database(trace).ask(query).rows[0])


def _cells(took, tokens, mean, rms, largest, equal):
    return {
        "replay s": f"{took:.1f}", "tokens": f"{tokens:,}", "mean abs d": f"{mean:.3g}", "rms d": f"{rms:.3g}",
        "max abs d": f"{largest:.3g}", "equal": f"{equal:.4f}",
    }  # fmt: skip


def _name(arm):
    return arm.replace("=", "-").replace(",", "_")


@cache
def _replayed(size, device, room, arm, step):
    from tim_trace.replay.engine import replay

    trace = _trace(size, room, device)
    return _seconds(lambda: replay(trace, steps=step, arm=[f"{arm},name={_name(arm)}"]))


def _arm(arguments, room, arm):
    from tim_trace.analysis.views import open_database

    step = ARMS.get(arm, "2")
    for other in (REFERENCE, BASE):
        _replayed(arguments.model, arguments.device, room, other, step)
    took = _replayed(arguments.model, arguments.device, room, arm, step)
    query = (
        "SELECT count(*), avg(abs(d)), sqrt(avg(d * d)), max(abs(d)), avg((d = 0)::INT) FROM pair('replay/{}', 'replay/{}') "
        f"WHERE step = {step}"
    )
    ask = open_database(_trace(arguments.model, room, arguments.device)).ask
    tokens, mean, rms, largest, _ = ask(query.format(_name(arm), _name(REFERENCE))).rows[0]
    *_, equal = ask(query.format(_name(arm), _name(BASE))).rows[0]
    return _cells(took, tokens, mean, rms, largest, equal)


def _locate(arguments, room):
    """Locate.

    The table shows the first operator whose error exceeds its bound, and the largest error divided by its bound.
    Rounding alone stays below 1.
    """
    pairs = {
        "dtype=bf16 against dtype=fp64": ("dtype=bf16", "dtype=fp64"),
        "dtype=bf16 against dtype=bf16,attention=math": ("dtype=bf16", "dtype=bf16,attention=math"),
    }
    return [(name, partial(_located, arguments, room, *arms)) for name, arms in pairs.items()]


def _located(arguments, room, arm, against):
    from tim_trace.replay.locate.engine import locate

    found = locate(_trace(arguments.model, room, arguments.device), steps="2", arm=arm, against=against, sequences="2")
    return {
        "diverges at": found.first.operator if found.first else "nothing but rounding",
        "largest error over its bound": f"{max(each.ratio for each in found.operators):.3g}",
        "mean abs d": f"{found.mean_abs_d:.3g}",
    }


def _throughput(arguments, room):
    """Tokens per second.

    Prompt and response tokens are counted. A replay scores nine steps like step 1; the bare loop scores one such step,
    and its time is the median of three passes. *without loading* subtracts the time to replay one step.
    """
    return [
        ("transformers, a bare loop in bf16", partial(_bare, arguments)),
        ("replay as recorded", partial(_replay_speed, arguments, room, 0)),
        ("replay as recorded, without loading", partial(_replay_speed, arguments, room, 1)),
        ("vLLM, prompt_logprobs", partial(_vllm_speed, arguments, room)),
    ]


def _speed(size, seconds, steps=1):
    count, prompt, response = SHAPES[size]
    return {"tokens per second": f"{steps * count * (prompt + response) / seconds:,.0f}", "s": f"{seconds:.2f}"}


def _bare(arguments):
    prompt, (sequences, _) = SHAPES[arguments.model][1], _sequences(arguments.model)
    model = _model(arguments.model).to(arguments.device)

    def bare():
        _scores(model, sequences, prompt)

    bare()
    return _speed(arguments.model, statistics.median(_seconds(bare) for _ in range(3)))


def _replay_speed(arguments, room, left_out):
    whole, one = _replay_seconds(arguments.model, arguments.device, room)
    return _speed(arguments.model, whole - left_out * one, REPEATS - left_out)


@cache
def _replay_seconds(size, device, room):
    """Return the seconds of a replay of all steps, and of one."""
    from tim_trace.replay.engine import replay

    prompt, (sequences, _) = SHAPES[size][1], _sequences(size)
    logprobs = _scores(_model(size).to(device), sequences, prompt)
    record_steps(room / "speed", _model(size).to("cpu"), [sequences] * REPEATS, prompt, ROWS, [logprobs] * REPEATS)
    traces = [copy_of(room / "speed", number) for number in range(3)]
    replay(traces[0], steps="1")
    return _seconds(lambda: replay(traces[1])), _seconds(lambda: replay(traces[2], steps="1"))


def _vllm_speed(arguments, room):
    return _speed(arguments.model, statistics.median(_engine_run(arguments, room, {"score": True})["seconds"]))


def _engines(arguments, room):
    """CUDA graphs and batch invariance of vLLM.

    Greedy samples of the same prompts: how many sequences have the first row's tokens, the share of these tokens with equal
    logprobs, and the mean difference in nats.
    """
    first = cache(partial(_engine_run, arguments, room, {}))
    return [(name, partial(_engine, arguments, room, options, first)) for name, options in ENGINES.items()]


def _engine(arguments, room, options, first):
    base = first()["samples"]
    found = _engine_run(arguments, room, options)["samples"] if options else base
    same = [(a, b) for a, b in zip(found, base, strict=True) if a["ids"] == b["ids"]]
    cells = {"same tokens": f"{len(same)} of {len(found)}"}
    if same:
        d = np.abs(np.concatenate([np.subtract(a["logprobs"], b["logprobs"]) for a, b in same]))
        cells |= {"equal logprobs": f"{np.mean(d == 0):.4f}", "mean abs d": f"{d.mean():.3g}"}
    return cells


def _engine_run(arguments, room, options):
    """Return an engine's output from its own process. Raises RuntimeError with the last line that it wrote."""
    from tim_trace.analysis.weights import export

    folder = room / "model"
    if not folder.exists():
        export(_trace(arguments.model, room, arguments.device), 0, folder)
    result = room / "engine.json"
    result.unlink(missing_ok=True)
    given = options | {"result": str(result), "model": arguments.model, "device": arguments.device}
    env = os.environ | ({"VLLM_BATCH_INVARIANT": "1"} if options.get("invariant") else {})
    done = subprocess.run(
        [sys.executable, __file__, "--sample", folder, json.dumps(given)],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if not result.exists():
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return json.loads(result.read_text())


def _sample(folder, options):
    """Let vLLM sample or score in its own process, and write its output."""
    from vllm import LLM, SamplingParams

    given = json.loads(options)
    _, prompt, response = SHAPES[given["model"]]
    engine = LLM(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=given.get("enforce_eager", False),
        max_num_seqs=given.get("max_num_seqs", 64), max_model_len=prompt + response + 8, seed=0,
    )  # fmt: skip
    sequences = [ids.tolist() for ids in _sequences(given["model"])[0]]
    found = {}
    if given.get("score"):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        engine.generate(prompts[:2], params, use_tqdm=False)
        found["seconds"] = [_seconds(lambda: engine.generate(prompts, params, use_tqdm=False)) for _ in range(3)]
    else:
        params = SamplingParams(temperature=0.0, max_tokens=response, logprobs=0, detokenize=False, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": ids[:prompt]} for ids in sequences], params, use_tqdm=False)
        found["samples"] = [
            {
                "ids": list(output.outputs[0].token_ids),
                "logprobs": [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs],
            }
            for output in outputs
        ]
    Path(given["result"]).write_text(json.dumps(found))


PARTS = {
    "recording": _recording, "replay": _replay, "locate": _locate, "throughput": _throughput, "engines": _engines,
}  # fmt: skip


if __name__ == "__main__":
    main()
