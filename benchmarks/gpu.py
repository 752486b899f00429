"""What a GPU gives: the noise of every dtype and attention kernel, CUDA graphs, batches, the exact engine, copies, and speed.

    python benchmarks/gpu.py                                  # where there is a CUDA device; `make bench-gpu` does this
    python benchmarks/gpu.py --device cpu --model tiny -o F   # the same program where there is none

It writes docs/gpu.md. A part that cannot run says why in its place, and the others go on. Models have random weights: noise
depends on the shapes and scales of a model, so these figures are of this one; speeds are those of its size.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from comparison import ratios
from replaying import copy_of, record_steps

SIZES = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
SHAPES = {"tiny": (1, 16, 8, 24), "0.6b": (1, 64, 128, 384)}
"""Steps, sequences a step, prompt and response tokens of a sequence."""
ROWS = 8

ARMS = [
    "dtype=fp64", "dtype=fp32", "dtype=tf32", "dtype=bf16", "dtype=fp16", "dtype=bf16,lm-head=fp32",
    *(f"dtype=bf16,attention={kernel}" for kernel in ("eager", "math", "flash", "efficient", "cudnn", "flex")),
    "dtype=bf16,batch-size=1", "dtype=bf16,padding=packed", "dtype=bf16,compile=true", "dtype=bf16,mode=decode",
    "dtype=bf16,deterministic=true", "dtype=bf16,quantize=int8", "dtype=bf16,quantize=fp8",
    "engine=exact,dtype=bf16", "engine=exact,dtype=bf16,batch-size=1,mode=decode",
    "engine=vllm,dtype=bf16", "engine=vllm,dtype=bf16,mode=decode",
]  # fmt: skip
REFERENCE = "dtype=fp64"

ENGINES = {
    "CUDA graphs, batches of 64": {},
    "no graphs, batches of 64": {"enforce_eager": True},
    "no graphs, one sequence at a time": {"enforce_eager": True, "max_num_seqs": 1},
    "batch invariant, batches of 64": {"invariant": True},
    "batch invariant, one sequence at a time": {"invariant": True, "max_num_seqs": 1},
}
"""What vLLM samples with; greedy, so that sequences part only where bits do."""

LAYERS, WIDTH, BATCH, TOKENS, ROUNDS = 12, 2048, 64, 512, 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(SIZES), default="0.6b")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    parser.add_argument("--sample", nargs=2, metavar=("FOLDER", "OPTIONS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        _sample(*arguments.sample)
        return
    parts = ["# On a GPU\n\n`make bench-gpu` measures this page and writes it.\n"]
    if arguments.device == "cuda" and not _has_cuda():
        titles = ", ".join(_title(part) for part in PARTS)
        parts.append(f"It has not been run: no CUDA device was at hand. What it will hold: {titles}.\n")
    else:
        parts.append(_machine(arguments))
        with tempfile.TemporaryDirectory() as room:
            for part in PARTS:
                print(part.__doc__.splitlines()[0], file=sys.stderr, flush=True)
                parts.append(_or_why(part, arguments, Path(room)))
    arguments.output.write_text("\n".join(parts), encoding="utf-8")


def _has_cuda():
    import torch

    return torch.cuda.is_available()


def _machine(arguments):
    import torch

    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    return (
        f"{where}; torch {torch.__version__}, CUDA {torch.version.cuda}; a Qwen3 of the size {arguments.model} with random weights. A "
        "part that could not run says why.\n"
    )


def _title(part):
    return part.__doc__.splitlines()[0]


def _or_why(part, arguments, room):
    """The text of a part, or why it has none."""
    title, lead = _title(part), "\n".join(line.strip() for line in part.__doc__.splitlines()[1:]).strip()
    try:
        table = part(arguments, room)
    except Exception as error:  # the others go on
        table = f"Not run: {_line(error)}\n"
    return f"## {title}\n\n{lead}\n\n{table}" if lead else f"## {title}\n\n{table}"


def _line(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def _model(arguments):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES[arguments.model], dtype="float32")).eval()


def _sequences(arguments):
    steps, count, prompt, response = SHAPES[arguments.model]
    vocab = SIZES[arguments.model]["vocab_size"]
    return [list(np.random.default_rng(seed).integers(0, vocab, (count, prompt + response))) for seed in range(steps)]


def _trace(arguments, room):
    """A trace of the model and its sequences, made once."""
    trace = room / "run"
    if not trace.exists():
        prompt = SHAPES[arguments.model][2]
        record_steps(trace, _model(arguments).to("cpu"), _sequences(arguments), prompt, ROWS)
    return trace


def _arms(arguments, room):
    """Arms of a replay

    d is against fp64 on the same device, in nats; equal: the share of tokens with the bits of the arm `dtype=bf16`. Seconds
    have loading and writing in them.
    """
    from tim_trace.analysis.trace.database import Database
    from tim_trace.replay.engine import replay

    trace, taken, why = _trace(arguments, room), {}, {}
    for arm in ARMS:
        start = time.perf_counter()
        try:
            replay(trace, arm=[f"{arm},name={_name(arm)}"])
            taken[arm] = time.perf_counter() - start
        except Exception as error:  # a kernel that is not there is a result
            why[arm] = _line(error)
    rows = []
    for arm in ARMS:
        if arm in why:
            rows.append((f"`{arm}`", f"not run: {why[arm]}", "", "", "", ""))
            continue
        row = [f"`{arm}`", f"{taken[arm]:.1f}", "", "", "", ""]
        name = f"replay/{_name(arm)}"
        if REFERENCE in taken:
            mean, rms, largest = (
                Database(trace)
                .ask(
                    f"SELECT avg(abs(d)), sqrt(avg(d * d)), max(abs(d)) FROM pair('{name}', 'replay/{_name(REFERENCE)}')"
                )
                .rows[0]
            )
            row[2:5] = [f"{mean:.3g}", f"{rms:.3g}", f"{largest:.3g}"]
        if "dtype=bf16" in taken:
            ((equal,),) = (
                Database(trace)
                .ask(f"SELECT avg((d = 0)::INT) FROM pair('{name}', 'replay/{_name('dtype=bf16')}')")
                .rows
            )
            row[5] = f"{equal:.4f}"
        rows.append(row)
    return _table(["arm", "seconds", "mean abs d", "rms d", "max abs d", "equal"], rows)


def _name(arm):
    return arm.replace("=", "-").replace(",", "_")


def _throughput(arguments, room):
    """Tokens a second

    Prompt and response tokens of one pass over all sequences, the median of three; loading left out where it can be.
    """
    import torch
    from tim_trace.replay.engine import replay

    trace, sequences = _trace(arguments, room), _sequences(arguments)
    prompt = SHAPES[arguments.model][2]
    model = _model(arguments).to(arguments.device, torch.bfloat16)
    total = sum(len(ids) for step in sequences for ids in step)

    def bare():
        for step in sequences:
            for start in range(0, len(step), ROWS):
                ids_BW = torch.from_numpy(np.stack(step[start : start + ROWS])).to(arguments.device)
                with torch.no_grad():
                    logits_BTV = model(ids_BW, logits_to_keep=ids_BW.shape[1] - prompt + 1).logits[:, :-1]
                    torch.log_softmax(logits_BTV.float(), -1).gather(-1, ids_BW[:, prompt:, None]).cpu()

    bare()
    bare_s = [_seconds(bare) for _ in range(3)]
    replay_s = [_seconds(lambda n=n: replay(copy_of(trace, n), arm=["dtype=bf16"])) for n in range(3)]
    rows = [
        ("transformers, a bare loop in bf16", f"{total / statistics.median(bare_s):,.0f}"),
        (
            "`tim-trace replay --dtype bf16`, the model loaded twice and the identity arm beside it",
            f"{total / statistics.median(replay_s):,.0f}",
        ),
    ]
    try:
        found = _engine_run(arguments, room, {"score": True})
        rows.append(("vLLM, `prompt_logprobs`", f"{total / statistics.median(found['seconds']):,.0f}"))
    except RuntimeError as error:
        rows.append(("vLLM, `prompt_logprobs`", f"not run: {error}"))
    return _table(["", "tokens a second"], rows)


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _engines(arguments, room):
    """CUDA graphs and batch invariance of vLLM

    Greedy samples of the same prompts: how many sequences have the tokens of the first row, and of their tokens the share with
    equal logprobs and the mean difference, in nats.
    """
    rows, first = [], None
    for name, options in ENGINES.items():
        try:
            found = _engine_run(arguments, room, options)["samples"]
        except RuntimeError as error:
            rows.append((name, f"not run: {error}", "", ""))
            continue
        first = first or found
        same = [(a, b) for a, b in zip(found, first, strict=True) if a["ids"] == b["ids"]]
        d = np.abs(np.concatenate([np.subtract(a["logprobs"], b["logprobs"]) for a, b in same] or [np.zeros(0)]))
        if len(d):
            rows.append((name, f"{len(same)} of {len(found)}", f"{np.mean(d == 0):.4f}", f"{d.mean():.3g}"))
        else:
            rows.append((name, f"0 of {len(found)}", "", ""))
    return _table(["engine", "same tokens", "equal logprobs", "mean abs d"], rows)


def _engine_run(arguments, room, options):
    """What an engine in a process of its own gives. Raises RuntimeError with the last line that it wrote."""
    from tim_trace.analysis.weights import export

    folder = room / "model"
    if not folder.exists():
        export(_trace(arguments, room), 0, folder, dtype="bf16")
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
    """In a process of its own: let vLLM sample, or score, and write what it gives."""
    from vllm import LLM, SamplingParams

    given = json.loads(options)
    arguments = argparse.Namespace(model=given["model"])
    prompt, response = SHAPES[given["model"]][2:]
    engine = LLM(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=given.get("enforce_eager", False),
        max_num_seqs=given.get("max_num_seqs", 64), max_model_len=prompt + response + 8, seed=0,
    )  # fmt: skip
    sequences = [ids.tolist() for step in _sequences(arguments) for ids in step]
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


def _copies(arguments, room):
    """Recording from the device

    A loop of matrix products on the device with a recorder beside it, over the same loop alone, in turn; and the time of the
    calls in the thread that trains.
    """
    import torch
    from tim_trace.tracer.recorder import Recorder

    device = arguments.device
    layers, width, batch = (LAYERS, WIDTH, BATCH) if device == "cuda" else (2, 256, 8)
    weights = [torch.randn(width, width, device=device) for _ in range(layers)]
    logprobs = -torch.rand(batch, TOKENS, device=device)
    ids = torch.randint(0, 1000, (batch, TOKENS))

    def train():
        values = torch.ones(width, width, device=device)
        for weight in weights:
            values = torch.tanh(values @ weight)
        return float(values.sum())  # waits, as the logging of a loss does

    alone, recorded, calls = [], [], []
    with Recorder(room / "copies") as recorder:
        for step in range(1, ROUNDS + 1):
            alone.append(_seconds(train))

            def with_recording(step=step):
                start = time.perf_counter()
                added = recorder.add_sequences(step=step, response_ids=ids)
                for name in ("train", "rollout"):
                    recorder.add_scores(name, added, logprobs=logprobs)
                calls.append(time.perf_counter() - start)
                train()

            recorded.append(_seconds(with_recording))
    share = ratios(recorded[2:], alone[2:])
    per_token = [took / (batch * TOKENS * 2) * 1e9 for took in calls[2:]]
    return _table(
        ["", "median", "range"],
        [
            ("a step with recording over one without", *_middle(share, ".3f")),
            ("calls in the thread that trains, ns a token", *_middle(per_token, ".1f")),
        ],
    )


def _middle(values, form):
    return f"{statistics.median(values):{form}}", f"{min(values):{form}} to {max(values):{form}}"


PARTS = (_copies, _arms, _throughput, _engines)


if __name__ == "__main__":
    main()
