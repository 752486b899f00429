"""Output folders of frameworks, with all that a run leaves beside its dumps: what `import auto` makes of each."""

import json
import shlex

import dumps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import tim_trace
from dumps import WRITERS, make_steps
from tim_trace import connect, import_dump, info
from tim_trace.schemas.errors import ImportFailed


def write(folder, *names):
    """Files of a run whose content does not matter here."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".pt", ".bin")):
            torch.save({"model": torch.ones(3), "step": 1}, path)
        elif name.endswith(".json"):
            path.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 4}, indent=1))
        elif name.endswith(".jsonl"):
            path.write_text(json.dumps({"prompt": "a", "answer": "b", "score": 1.0}) + "\n")
        else:
            path.write_text("step:1 - actor/loss:0.5\n" if name.endswith(".log") else "x: 1\n")


HF = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
LEFT = {
    "verl": (
        ".hydra/config.yaml", "main_ppo.log", "ckpt/latest_checkpointed_iteration.txt", "ckpt/global_step_2/data.pt",
        "ckpt/global_step_2/actor/model_world_size_2_rank_0.pt", "ckpt/global_step_2/actor/optim_world_size_2_rank_0.pt",
        "ckpt/global_step_2/actor/fsdp_config.json", *(f"ckpt/global_step_2/actor/huggingface/{name}" for name in HF),
        "tensorboard_log/p/e/hparams.yaml", "wandb/run-20260101_000000-abc/files/wandb-summary.json",
    ),
    "slime": (
        "ckpt/latest_checkpointed_iteration.txt", "ckpt/iter_0000002/common.pt", "ckpt/iter_0000002/__0_0.distcp",
        "ckpt/iter_0000002/metadata.json", "ckpt/rollout/global_dataset_state_dict_2.pt", "logs/train.log",
    ),
    "skyrl": (
        "ckpts/latest_ckpt_global_step.txt", "ckpts/global_step_2/trainer_state.pt", "ckpts/global_step_2/data.pt",
        "ckpts/global_step_2/policy/model_world_size_2_rank_0.pt", *(f"ckpts/global_step_2/policy/huggingface/{n}" for n in HF),
        "exports/dumped_evals/global_step_2_evals/aggregated_results.jsonl", "logs/infra-260101_000000.log",
    ),
    "prime-rl": (
        "configs/rl.toml", "configs/trainer.toml", "configs/orchestrator.toml", "logs/trainer.log", "logs/orchestrator.log",
        "checkpoints/step_2/trainer/__0_0.distcp", "broadcasts/step_2/STABLE", "broadcasts/step_2/model.safetensors",
        "rollouts/step_2/train/all/traces.jsonl",
    ),
    "nemo-rl": (
        "results/grpo/step_2/training_info.json", "results/grpo/step_2/config.yaml", "logs/exp_001/val_data_step2.jsonl",
        *(f"results/grpo/step_2/policy/weights/{name}" for name in HF), "logs/exp_001/ray-driver.log",
    ),
    "trl": (*HF, "README.md", "training_args.bin", "checkpoint-2/rng_state.pth", *(f"checkpoint-2/{name}" for name in HF)),
    "OpenRLHF": (
        "ckpt/_actor/latest", "ckpt/_actor/global_step2/mp_rank_00_model_states.pt", "train.log", *(f"step_2_hf/{n}" for n in HF),
        "ckpt/_actor/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt", "ckpt/_critic/latest",
    ),
}  # fmt: skip
HOW = {
    "verl": r"DataProto\.save_to_disk.*tim-trace record -o RUN",
    "slime": "--dump-details DIR",
    "skyrl": r"trainer\.dump_data_batch=true",
    "prime-rl": r"trainer\.enable_token_export = true",
    "nemo-rl": r"train_data_step<N>\.jsonl",
    "trl": "tim-trace record -o RUN",
    "OpenRLHF": r"no tokens\. Record its batches with tim_trace\.Recorder",
}


@pytest.mark.parametrize("framework", list(LEFT))
def test_an_output_folder_without_a_dump_names_the_option_that_writes_one(tmp_path, framework):
    write(tmp_path / "out", *LEFT[framework])
    with pytest.raises(ImportFailed, match=rf"out contains no dump\. {framework} writes .*{HOW[framework]}") as raised:
        import_dump("auto", tmp_path / "out", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    message = str(raised.value)
    assert "\n" not in message
    assert ("tim-trace import metrics" in message) == any(name.endswith(".log") for name in LEFT[framework])


@pytest.mark.parametrize("framework", [name for name in LEFT if name in WRITERS])
def test_a_dump_is_found_beside_all_that_a_run_leaves(tmp_path, framework):
    write(tmp_path / "out", *LEFT[framework])
    WRITERS[framework](tmp_path / "out" / "dump", make_steps(1, 2))
    imported = import_dump("auto", tmp_path / "out", output=tmp_path / "run")
    assert (imported.format, imported.num_sequences) == (framework, 12)
    query = "SELECT DISTINCT step FROM sequences ORDER BY 1"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(1,), (2,)]


def test_miles_is_found_beside_the_checkpoints_of_megatron(tmp_path):
    write(tmp_path / "out", *LEFT["slime"])
    WRITERS["miles"](tmp_path / "out" / "dump", make_steps(1))
    assert import_dump("auto", tmp_path / "out", output=tmp_path / "run").format == "miles"


def test_the_command_for_the_curves_runs(tmp_path):
    write(tmp_path / "out put", *LEFT["verl"])
    done = tim_trace("import", "auto", tmp_path / "out put", "-o", tmp_path / "run")
    assert done.code == 2
    _, _, command = done.stderr.strip().partition("tim-trace import metrics ")
    path, _, _ = shlex.split(command)
    assert tim_trace("import", "metrics", path, "-o", tmp_path / "run").code == 0


def test_curves_alone_are_imported_and_say_how_to_get_tokens(tmp_path):
    write(tmp_path / "out", *LEFT["trl"])
    state = {"log_history": [{"step": 1, "reward": 0.5}]}
    (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    done = tim_trace("import", "auto", tmp_path / "out", "-o", tmp_path / "run")
    assert done.code == 0
    assert "imported 1 logged value" in done.stderr
    assert "no tokens: trl writes" in done.stderr
    assert "tim-trace record -o RUN" in done.stderr
    assert info(str(tmp_path / "run")).num_metrics == 1


def test_a_table_of_one_s_own_beside_checkpoints_is_read(tmp_path):
    write(tmp_path / "out", "training_args.bin", "checkpoint-2/config.json")
    row = {"step": 1, "prompt_ids": [1], "ids": [2, 3], "train_logprobs": [-0.5, -0.25]}
    dumps.write_lines(tmp_path / "out" / "dump.jsonl", [row])
    imported = import_dump("auto", tmp_path / "out", output=tmp_path / "run", map={"ids": "response_ids"})
    assert (imported.format, imported.num_tokens) == ("parquet", 2)


def test_an_export_of_curves_is_named_as_such(tmp_path):
    rows = [{"_step": step, "_timestamp": 1.5, "reward": 0.5, "gradients": {"bins": [1, 2]}} for step in range(3)]
    dumps.write_lines(tmp_path / "history.jsonl", rows)
    for format in ("auto", "parquet"):
        with pytest.raises(ImportFailed, match=r"without tokens: tim-trace import metrics .*history\.jsonl -o RUN"):
            import_dump(format, tmp_path / "history.jsonl", output=tmp_path / "run")
    imported = import_dump("metrics", tmp_path / "history.jsonl", output=tmp_path / "run")
    assert (imported.num_metrics, imported.ignored_columns) == (3, ("_timestamp", "gradients/bins"))


def test_a_history_in_parquet_is_curves_and_a_table_of_tokens_is_not(tmp_path):
    history = {"_step": [0, 1, 2], "_timestamp": [1.5] * 3, "reward": [0.5, None, 0.25], "text": ["a", None, None]}
    nested = {"gradients": [{"bins": [1, 2]}] * 3}
    tokens = {"step": [1], "prompt_ids": [[1]], "response_ids": [[2]], "train_logprobs": [[-0.5]]}
    for name, table in (("history", history), ("nested", history | nested), ("tokens", tokens)):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    numbers = {name: values for name, values in history.items() if name != "text"}
    pq.write_table(pa.table(numbers), tmp_path / "numbers.parquet")
    imported = import_dump("auto", tmp_path / "numbers.parquet", output=tmp_path / "a")
    assert (imported.format, imported.num_metrics) == ("metrics", 2)
    assert import_dump("auto", tmp_path / "tokens.parquet", output=tmp_path / "b").format == "parquet"
    imported = import_dump("metrics", tmp_path / "nested.parquet", output=tmp_path / "c")
    assert (imported.num_metrics, set(imported.ignored_columns)) == (3, {"_timestamp", "gradients"})
    with pytest.raises(ImportFailed, match=r"missing columns.*tim-trace import metrics .*nested\.parquet -o RUN"):
        import_dump("auto", tmp_path / "nested.parquet", output=tmp_path / "d")


@pytest.mark.parametrize("format", ["nemo-rl", "prime-rl", "slime", "verl"])
def test_several_runs_in_a_folder_are_not_mixed(tmp_path, format):
    for name in ("exp_001", "exp_002"):
        WRITERS[format](tmp_path / "logs" / name, make_steps(1))
    with pytest.raises(ImportFailed, match=r"has step 1 in both exp_001.* and exp_002.*Pass one of these folders"):
        import_dump("auto", tmp_path / "logs", output=tmp_path / "run")
    assert import_dump("auto", tmp_path / "logs" / "exp_002", output=tmp_path / "run").num_sequences == 6


def test_validation_text_of_verl_is_not_mixed_with_training(tmp_path):
    for name in ("rollouts", "validation"):
        dumps.write_lines(tmp_path / "out" / name / "5.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 5}])
    with pytest.raises(ImportFailed, match="has step 5 in both rollouts and validation"):
        import_dump("auto", tmp_path / "out", output=tmp_path / "run")


def test_batches_of_verl_beside_text_are_named(tmp_path):
    dumps.write_verl(tmp_path / "out" / "batches", make_steps(5))
    dumps.write_lines(
        tmp_path / "out" / "rollouts" / "5.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 5}]
    )
    with pytest.raises(ImportFailed, match=r"tim-trace import verl .*batches/5/gen_batch\.dp -o RUN"):
        import_dump("auto", tmp_path / "out", output=tmp_path / "run")


def test_two_frameworks_in_a_folder_are_named_with_their_commands(tmp_path):
    dumps.write_nemo_rl(tmp_path / "two", make_steps(1))
    dumps.write_skyrl(tmp_path / "two", make_steps(1))
    with pytest.raises(
        ImportFailed, match=r"tim-trace import skyrl \S+two -o RUN or tim-trace import nemo-rl \S+two -o RUN"
    ):
        import_dump("auto", tmp_path / "two", output=tmp_path / "run")
