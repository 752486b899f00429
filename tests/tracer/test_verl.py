"""Recording verl: what its batches, workers and settings become, without verl itself; test_verl_live.py runs it."""

import asyncio
import importlib.util
import inspect
import json
import sys
from functools import partial
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks import verl, vllm_async
from tim_trace.tracer.hooks.patches import Patches
from tim_trace.tracer.hooks.ray import with_order
from tim_trace.tracer.hooks.session import BOOTSTRAP, ENVIRONMENT, Order, Session
from tim_trace.tracer.hooks.verl import TrainerHooks
from tim_trace.tracer.hooks.verl_batches import (
    UPDATE_KEY,
    column,
    finish_reasons,
    flat,
    one_a_row,
    progress_of,
    rows_of,
    rows_of_padded,
)
from tim_trace.tracer.hooks.verl_contract import policy_loss
from tim_trace.tracer.hooks.verl_worker import WorkerHooks
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights

END = 1


class Settings(dict):
    """A configuration as OmegaConf gives it: settings by attribute, and by get()."""

    __getattr__ = dict.__getitem__


def settings(value):
    return Settings({name: settings(item) for name, item in value.items()}) if isinstance(value, dict) else value


def config(**changes):
    found = settings(
        {
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp2", "loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"},
                    "use_kl_loss": False, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.001, "entropy_coeff": 0.0,
                    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0,
                },
                "rollout": {"name": "vllm", "dtype": "bfloat16", "temperature": 1.0, "top_p": 1.0, "top_k": -1},
            },
            "algorithm": {"rollout_correction": {"bypass_mode": False, "rollout_is": None}},
            "data": {"max_response_length": 4},
        }
    )  # fmt: skip
    found["algorithm"]["rollout_correction"].update(changes.pop("correction", {}))
    found["actor_rollout_ref"]["actor"].update(changes)
    return found


def nested(*rows, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


PROMPTS = [[5, 6], [5, 6], [7], [0, 0, 0]]
RESPONSES = [[8, 9, END], [8, 8, 8, 8], [9, 9], [END]]
MASKS = [[1, 1, 1], [1, 0, 0, 1], [1, 1], [0]]
ROLLOUT = [[-0.5, -0.25, -0.125], [-1.0, 0.0, 0.0, -2.0], [-3.0, -4.0], [0.0]]
TRAIN = [[-0.5, -0.375, -0.125], [-1.5, -9.0, -9.0, -2.5], [-3.0, -4.5], [-8.0]]


def stored():
    """Three rows and a fourth that verl made up to fill the batch."""
    return {
        "prompts": nested(*PROMPTS, dtype=torch.int64),
        "responses": nested(*RESPONSES, dtype=torch.int64),
        "response_mask": nested(*MASKS, dtype=torch.int64),
        "rm_scores": nested([0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5], [0.0, -1.0], [0.0]),
        "rollout_log_probs": nested(*ROLLOUT),
        "old_log_probs": nested(*TRAIN),
        "ref_log_prob": nested(*TRAIN),
    }


def made_batch():
    keys = ["a-b_0_0", "a-b_1_0", "c_0_0", "pad_0_0"]
    tags = [{"min_global_steps": 2, "max_global_steps": 3}] * 3 + [{"is_padding": True}]
    return SimpleNamespace(keys=keys, tags=tags, partition_id="train", extra_info={})


@pytest.fixture
def session(tmp_path):
    manifest = Manifest(run_id="run", created_at="2026-01-01T00:00:00Z", created_by="0", source="record")
    with new_trace(tmp_path / "run", manifest, force=False) as folder:
        session = Session(Order(run=str(folder), session="a"))
        session.note("begun")
    yield session
    session.seal()


@pytest.fixture
def queue(monkeypatch):
    """verl's TransferQueue: columns by name."""
    module = ModuleType("transfer_queue")
    module.columns = stored()
    module.kv_batch_get = lambda keys, partition_id, select_fields: {
        name: module.columns[name] for name in select_fields if name in module.columns
    }
    monkeypatch.setitem(sys.modules, "transfer_queue", module)
    return module


def a_trainer(settings=None, **values):
    tokenizer = SimpleNamespace(eos_token_id=END)
    found = {"global_steps": 4, "parameter_sync_step": 1, "local_trigger_step": 0, "total_training_steps": 9}
    return SimpleNamespace(config=settings or config(), tokenizer=tokenizer, **(found | values))


def recorded(session, queue, advantages, trainer=None):
    """What `_compute_advantage` leaves in the trace. It takes the second row's last token out of the loss."""

    def original(trainer, batch, metrics):
        queue.columns["advantages"] = nested(*advantages)
        queue.columns["response_mask"] = nested([1, 1, 1], [1, 0, 0, 0], [1, 1], [0], dtype=torch.int64)
        return batch

    batch = made_batch()
    assert TrainerHooks(session).compute_advantage(original, trainer or a_trainer(), batch, {}) is batch
    session.seal()
    return connect(session.order.run)


def rows(connection, query):
    return connection.execute(query).fetchall()


ONE = [[0.5, 0.5, 0.5], [-0.5, 0.0, 0.0, -0.5], [0.0, 0.0], [0.0]]


def test_a_batch_becomes_sequences_and_passes(session, queue):
    trace = recorded(session, queue, ONE)
    query = """
        SELECT step, seq_id, group_id, policy_version, prompt_ids, response_ids, response_mask, reward, advantage, top_k,
        finish_reason FROM sequences ORDER BY seq_id
    """
    masks = [[bool(cell) for cell in mask] for mask in MASKS]
    assert rows(trace, query) == [
        (4, "a-b_0_0", "a-b", 2, [5, 6], RESPONSES[0], masks[0], 1.0, 0.5, 0, "stop"),
        (4, "a-b_1_0", "a-b", 2, [5, 6], RESPONSES[1], masks[1], 0.5, -0.5, 0, "length"),
        (4, "c_0_0", "c", 2, [7], RESPONSES[2], masks[2], -1.0, 0.0, 0, None),
    ]
    passes = rows(trace, "SELECT pass, seq_id, logprobs, policy_version FROM scores ORDER BY pass, seq_id")
    assert [row[0] for row in passes] == ["reference"] * 3 + ["rollout"] * 3 + ["train"] * 3
    assert [row[2] for row in passes if row[0] == "train"] == TRAIN[:3]
    assert {row[3] for row in passes if row[0] == "train"} == {3}


def test_tokens_that_were_not_sampled_have_no_rollout_logprob(session, queue):
    trace = recorded(session, queue, ONE)
    ((logprobs,),) = rows(trace, "SELECT logprobs FROM scores WHERE pass = 'rollout' AND seq_id = 'a-b_1_0'")
    assert logprobs == [-1.0, None, None, -2.0]


def test_advantages_that_differ_by_token_are_kept_by_token(session, queue):
    by_token = [[0.5, 0.25, 0.5], *ONE[1:]]
    trace = recorded(session, queue, by_token)
    query = "SELECT advantage, advantages FROM sequences ORDER BY seq_id"
    assert rows(trace, query) == [(None, row) for row in by_token[:3]]


def test_a_copy_of_the_rollout_s_logprobs_is_no_train_pass(session, queue):
    trace = recorded(session, queue, ONE, a_trainer(config(correction={"bypass_mode": True})))
    assert rows(trace, "SELECT DISTINCT pass FROM scores ORDER BY pass") == [("reference",), ("rollout",)]


def test_versions_count_updates_where_a_step_has_several(session, queue):
    trainer = a_trainer(parameter_sync_step=4, local_trigger_step=2)
    trace = recorded(session, queue, ONE, trainer)
    query = "SELECT DISTINCT s.policy_version, t.policy_version FROM sequences s JOIN scores t USING (step, seq_id) WHERE pass = 'train'"
    assert rows(trace, query) == [(8, 14)]


def test_a_worker_declares_what_decides_the_trainer_s_logprobs(session, queue):
    hooks = WorkerHooks(session)
    output = {"log_probs": nested(*TRAIN, dtype=torch.bfloat16)}
    worker = SimpleNamespace(engine=an_engine())

    def infer_batch(worker, data):
        return output

    def compute_log_prob(actor, data):
        return hooks.infer(infer_batch, worker, {"temperature": 0.5})

    hooks.score("train", compute_log_prob, SimpleNamespace(), made_batch())
    session.seal()
    trace = recorded(session, queue, ONE)
    contracts = rows(trace, "SELECT contract_json FROM passes WHERE pass = 'train'")
    ((text,),) = contracts
    assert json.loads(text)["logprobs_dtype"] == "bfloat16"
    assert json.loads(text)["temperature"] == 0.5
    assert json.loads(text)["model"]["attention"] == "sdpa"
    # As verl 0.7 has it, whose engine does not name the dtype of its autocast.
    assert (json.loads(text)["model"]["parameters_dtype"], json.loads(text)["autocast"]) == ("bfloat16", "bfloat16")


def test_the_actor_without_its_adapter_is_its_own_reference(session, queue):
    hooks = WorkerHooks(session)
    output = {"log_probs": nested(*TRAIN)}
    asked = {"temperature": 1.0, "no_lora_adapter": True}
    worker = SimpleNamespace(engine=an_engine())
    score = lambda actor, data: hooks.infer(lambda worker, data: output, worker, asked)  # noqa: E731
    hooks.score("train", score, SimpleNamespace(), made_batch())
    session.seal()
    names = rows(connect(session.order.run), "SELECT pass FROM passes")
    assert names == [("reference",)]


def test_the_contract_is_the_one_that_the_engine_declared_for_training(session, queue):
    for temperature in (1.0, 0.0):  # validation comes last
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": -1}
        session.recorder.add_contract("rollout", {"engine": "vllm", "sampling": sampling, "who": "the engine"})
    session.seal()
    trace = recorded(session, queue, ONE)
    used = rows(
        trace,
        "SELECT DISTINCT p.contract_json FROM scores s JOIN passes p USING (pass, contract) WHERE s.pass = 'rollout'",
    )
    ((text,),) = used
    assert json.loads(text)["sampling"]["temperature"] == 1.0
    assert json.loads(text)["who"] == "the engine"


def test_an_error_ends_the_recording_and_not_the_training(session, queue, capfd):
    queue.columns["old_log_probs"] = nested([0.0], [0.0], [0.0], [0.0])
    batch = made_batch()
    hooks = TrainerHooks(session)
    assert hooks.compute_advantage(lambda trainer, batch, metrics: "done", a_trainer(), batch, {}) == "done"
    session.seal()
    assert "training continues" in capfd.readouterr().err


@pytest.fixture
def padding(monkeypatch):
    """verl's own function that takes a response's values out of a packed forward."""
    for name in ("tensordict", "verl", "verl.utils", "verl.workers", "verl.workers.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__path__ = []
    sys.modules["tensordict"].TensorDict = dict
    tools = ModuleType("verl.utils.tensordict_utils")
    tools.get_non_tensor_data = lambda data, key, default: data.get(key, default)
    monkeypatch.setitem(sys.modules, "verl.utils.tensordict_utils", tools)
    sys.modules["verl.utils"].tensordict_utils = tools
    attention = ModuleType("verl.utils.attention_utils")
    attention.index_first_axis = attention.unpad_input = None
    monkeypatch.setitem(sys.modules, "verl.utils.attention_utils", attention)
    path = distribution("verl").locate_file("verl/workers/utils/padding.py")
    spec = importlib.util.spec_from_file_location("verl.workers.utils.padding", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "verl.workers.utils.padding", module)
    return module


class Rows(dict):
    """A TensorDict as far as recording looks at one."""


def an_engine(is_first=True, strategy="fsdp2"):
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(_attn_implementation="sdpa", to_dict=dict)
    return SimpleNamespace(
        engine_config=SimpleNamespace(strategy=strategy, use_dynamic_bsz=False, micro_batch_size_per_gpu=2),
        model_config=SimpleNamespace(path="a-model"),
        module=model,
        is_mp_src_rank_with_outputs=lambda: is_first,
        get_data_parallel_size=lambda: 1,
        get_data_parallel_rank=lambda: 0,
    )


def updated(
    session,
    *,
    is_train=False,
    is_first=True,
    batches=((2, 0), (1, 3)),
    strategy="fsdp2",
    engine=None,
    load=lambda: None,
):
    """Send a batch to a worker as verl does, and let its loss see mini-batches of these rows."""
    hooks, batch = WorkerHooks(session), made_batch()
    told = {
        "step": 4, "policy_version": 3, "is_train": is_train, "is_last": True, "left_out": ["pad_0_0"],
    }  # fmt: skip
    batch.extra_info[UPDATE_KEY] = told
    data = Rows(stored(), **{UPDATE_KEY: told})
    data = hooks.fetch(lambda meta: data, batch)
    assert UPDATE_KEY not in data

    def loss(config, model_output, data, dp_group=None):
        return "loss"

    def train_mini_batch(worker, data):
        load()
        for chosen in batches:
            hooks.mini_batch(one_mini_batch, worker, data, chosen)
        return "trained"

    def one_mini_batch(worker, data, chosen):
        parts = {name: value.unbind() for name, value in data.items() if name != "tim_trace_row"}
        some = Rows(
            {
                name: nested(*[value[row].tolist() for row in chosen], dtype=value[0].dtype)
                for name, value in parts.items()
            },
            tim_trace_row=data["tim_trace_row"][list(chosen)],
        )
        # A logprob lies at the place of the token before.
        whole = [[*[0.0] * (len(PROMPTS[row]) - 1), *TRAIN[row], 0.0] for row in chosen]
        output = {"log_probs": nested(*whole)}
        some["input_ids"] = nested(*[[*PROMPTS[row], *RESPONSES[row]] for row in chosen])
        hooks.micro_batches(lambda data: ([some], None), data)
        assert hooks.loss(loss, config=None, model_output=output, data=some) == "loss"

    worker = SimpleNamespace(engine=engine or an_engine(is_first, strategy))
    assert hooks.update(train_mini_batch, worker, data) == "trained"
    return connect(session.order.run)


def test_the_loss_s_logprobs_find_their_sequences(session, padding, queue):
    recorded(session, queue, ONE)
    trace = updated(session)
    query = "SELECT seq_id, iteration, logprobs, policy_version FROM scores WHERE pass = 'current' ORDER BY seq_id"
    assert rows(trace, query) == [
        ("a-b_0_0", 0, TRAIN[0], 3),
        ("a-b_1_0", 0, TRAIN[1], None),  # the second mini-batch: weights have changed since
        ("c_0_0", 0, TRAIN[2], 3),
    ]
    ((attempts,),) = rows(trace, "SELECT count(DISTINCT attempt) FROM scores")
    assert attempts == 1
    query = "SELECT seq_id, forward_id, forward_row, forward_rows, pad_right FROM scores WHERE pass = 'current' ORDER BY seq_id"
    # Packed, as verl has it by default; what fills the batch was row 1 of the second.
    assert rows(trace, query) == [("a-b_0_0", 0, 1, 2, 0), ("a-b_1_0", 1, 0, 2, 0), ("c_0_0", 0, 0, 2, 0)]


@pytest.mark.slow
def test_rows_that_the_loss_sees_again_are_further_iterations(session, padding, queue):
    recorded(session, queue, ONE)
    trace = updated(session, batches=((0, 1), (1, 0)))
    query = "SELECT iteration, count(*) FROM scores WHERE pass = 'current' GROUP BY ALL ORDER BY ALL"
    assert rows(trace, query) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_the_loss_s_first_logprobs_are_the_trainer_s_where_verl_computed_none(session, padding, queue):
    recorded(session, queue, ONE, a_trainer(config(correction={"bypass_mode": True})))
    trace = updated(session, is_train=True, batches=((0, 1), (1, 0)))
    query = "SELECT seq_id, logprobs FROM scores WHERE pass = 'train' ORDER BY seq_id"
    assert rows(trace, query) == [("a-b_0_0", TRAIN[0]), ("a-b_1_0", TRAIN[1])]
    assert info(session.order.run).model == "a-model"


@pytest.mark.slow
def test_of_processes_with_the_same_rows_one_records(session, padding, queue):
    recorded(session, queue, ONE)
    trace = updated(session, is_first=False)
    assert rows(trace, "SELECT count(*) FROM scores WHERE pass = 'current'") == [(0,)]


def scored_by(hooks, rank, micro_batches, *, rows=(0, 1), strategy="fsdp2", pass_name="train", mask=None, **settings):
    """The column that a worker of two adds to its output, of these rows in these micro-batches."""
    engine = an_engine(strategy=strategy)
    vars(engine.engine_config).update(settings)
    engine.pad_to_length = "pad_to_length_bucket" in settings
    engine.get_data_parallel_size, engine.get_data_parallel_rank = lambda: 2, lambda: rank
    whole = [[*PROMPTS[row], *RESPONSES[row]] for row in rows]
    data = Rows(temperature=1.0, use_remove_padding=settings.get("use_remove_padding", False))
    output = Rows(log_probs=nested(*whole))
    data.batch_size = output.batch_size = (len(rows),)

    def prepare_micro_batches(data):
        numbers = data.get("tim_trace_row", torch.arange(len(rows)))
        return [
            {"input_ids": ids, "loss_mask": ids if mask is None else mask, "tim_trace_row": numbers[list(chosen)]}
            for chosen in micro_batches
            for ids in [nested(*[whole[row] for row in chosen])]
        ], None

    def infer_batch(worker, data):
        hooks.micro_batches(prepare_micro_batches, data)
        return output

    def compute_log_prob(actor, data):
        return hooks.infer(infer_batch, SimpleNamespace(engine=engine), data)

    score = partial(hooks.score, pass_name)
    score(compute_log_prob, SimpleNamespace(), data)
    assert "tim_trace_row" not in data
    column = output.get(f"tim_trace_forward_{pass_name}")
    return None if column is None else column.tolist()


PADDED = [[0, 1, 2, 1], [0, 0, 2, 0]]
PACKED = {"use_remove_padding": True}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, PADDED),
        (PACKED, [[0, 1, 2, 0], [0, 0, 2, 0]]),
        (PACKED | {"ulysses_sequence_parallel_size": 4}, [[0, 1, 2, 1], [0, 0, 2, 0]]),
        (PACKED | {"pad_to_length_bucket": 16, "ulysses_sequence_parallel_size": 3}, [[0, 1, 2, 7], [0, 0, 2, 0]]),
    ],
    ids=["padded", "packed", "over four Ulysses ranks", "up to a bucket, over three"],
)
def test_a_worker_says_which_rows_went_through_the_model_together(session, settings, wanted):
    """A row's forward, its place there, the rows there, and the padding behind it: 5 and 6 tokens."""
    assert scored_by(WorkerHooks(session), 0, [(1, 0)], **settings) == wanted


@pytest.mark.parametrize(("release", "settings", "wanted"), [("0.7", {}, 4), ("0.7", PACKED, None), ("0.8", {}, None)])
def test_a_mask_as_wide_as_a_response_is_in_the_contract(session, padding, capfd, release, settings, wanted):
    """verl before 0.8 makes the attention's mask of padded rows out of the loss's."""
    if release == "0.7":
        del padding.build_attention_mask_from_nested
    scored_by(WorkerHooks(session), 0, [(1, 0)], mask=torch.ones(2, 4), **settings)
    session.seal()
    trace = connect(session.order.run)
    ((text,),) = rows(trace, "SELECT contract_json FROM passes WHERE pass = 'train'")
    assert json.loads(text).get("attended_tokens") == wanted
    assert ("attention sees only the first 4 tokens" in capfd.readouterr().err) == (wanted is not None)


def test_forwards_of_several_workers_and_calls_are_told_apart(session):
    first, second = WorkerHooks(session), WorkerHooks(session)
    columns = [scored_by(*given) for given in ((first, 0, [(0,), (1,)]), (second, 1, [(1, 0)]), (first, 0, [(0, 1)]))]
    assert [[forward for forward, *_ in column] for column in columns] == [[0, 2], [1, 1], [4, 4]]


def test_of_other_engines_padding_is_not_guessed(session):
    assert scored_by(WorkerHooks(session), 0, [(0, 1)], strategy="megatron") is None


def test_what_is_not_understood_of_micro_batches_ends_that_part_alone(session, capfd):
    assert scored_by(WorkerHooks(session), 0, [(0, 1)], **PACKED | {"ulysses_sequence_parallel_size": 0}) is None
    assert session.is_recording
    assert "how verl grouped rows into forward passes is not recorded" in capfd.readouterr().err


def test_the_driver_records_the_forwards_that_its_workers_told(session, queue):
    hooks = [WorkerHooks(session), WorkerHooks(session)]
    first = scored_by(hooks[0], 0, [(1, 0)])
    second = scored_by(hooks[1], 1, [(0,), (1,)], rows=(2, 3))
    queue.columns["tim_trace_forward_train"] = torch.tensor(first + second)
    trace = recorded(session, queue, ONE)
    query = """
        SELECT seq_id, forward_id, forward_row, forward_rows, pad_left, pad_right FROM scores WHERE pass = '{}' ORDER BY seq_id
    """
    assert rows(trace, query.format("train")) == [
        ("a-b_0_0", 0, 1, 2, 0, 1), ("a-b_1_0", 0, 0, 2, 0, 0), ("c_0_0", 1, 0, 1, 0, 0),
    ]  # fmt: skip
    assert rows(trace, query.format("reference"))[0] == ("a-b_0_0", None, None, None, None, None)


def test_the_older_trainer_keeps_what_its_workers_say_beside_the_logprobs(session):
    """It goes into the batch with the logprobs, is recorded at the update, and leaves with what else rode along."""
    hooks = TrainerHooks(session)
    hooks._describe = lambda trainer: session.recorder.describe(model={"name": "a-model"})
    batch, columns = padded_batch(["a", "a"], [0, 0]), {}
    for pass_name, function in (("train", "compute_log_prob"), ("reference", "compute_ref_log_prob")):
        column = torch.tensor(scored_by(WorkerHooks(session), 0, [(1, 0)], pass_name=pass_name))
        columns[function] = {f"tim_trace_forward_{pass_name}": column}
    group = SimpleNamespace(**{name: lambda batch, column=column: column for name, column in columns.items()})
    trainer = SimpleNamespace(
        config=config(),
        tokenizer=SimpleNamespace(eos_token_id=END),
        actor_rollout_wg=group,
        ref_policy_wg=group,
        **FULLY,
    )
    given = dict(vars(group))

    def compute_old_log_prob(trainer, batch):
        trainer.actor_rollout_wg.compute_log_prob(batch)
        return SimpleNamespace(batch={"old_log_probs": batch.batch["old_log_probs"]}), 0.5

    def compute_ref_log_prob(trainer, batch):
        trainer.ref_policy_wg.compute_ref_log_prob(batch)
        return SimpleNamespace(batch={"ref_log_prob": batch.batch["old_log_probs"]})

    result, mfu = hooks.compute_older_logprobs(compute_old_log_prob, trainer, batch)
    reference = hooks.compute_older_logprobs(compute_ref_log_prob, trainer, batch)
    assert mfu == 0.5
    assert vars(group) == given
    batch.batch |= result.batch | reference.batch
    hooks.update_older_actor(lambda trainer, batch: None, trainer, batch)
    assert not [name for name in batch.batch if name.startswith("tim_trace")]
    session.seal()
    query = "SELECT pass, seq_id, forward_row, forward_rows, pad_right FROM scores WHERE pass <> 'rollout' ORDER BY ALL"
    assert rows(connect(session.order.run), query) == [
        (name, f"a_{row}_0", 1 - row, 2, 1 - row) for name in ("reference", "train") for row in (0, 1)
    ]


@pytest.mark.parametrize(
    ("workers", "has_switch", "wanted"),
    [
        (("verl.workers.engine_workers",), False, None),
        (("my.workers", "verl.workers.engine_workers"), False, None),
        (("verl.workers.fsdp_workers",), True, "trainer.use_legacy_worker_impl=disable"),
        (("my.workers",), False, "derive them from verl.workers.engine_workers.ActorRolloutRefWorker"),
    ],
    ids=["recorded", "derived", "legacy", "own"],
)
def test_workers_that_are_not_hooked_are_named_at_the_start(session, capfd, workers, has_switch, wanted):
    cls = object
    for module in reversed(workers):
        cls = type("ActorRolloutRefWorker", (cls,), {"__module__": module})
    worker = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=cls))
    mapping = {"ActorRollout": worker, "Critic": object}
    switch = {"use_legacy_worker_impl": "auto"} if has_switch else {}
    hooks = TrainerHooks(session)
    hooks._tell_of_workers(SimpleNamespace(role_worker_mapping=mapping, **switch))
    found = [line for line in capfd.readouterr().err.splitlines() if "are not hooked, so current logprobs" in line]
    if wanted is None:
        assert found == []
    else:
        (line,) = found
        assert wanted in line
        assert f"workers in {workers[0]} are" in line


def test_a_program_that_is_run_as_main_is_imported_where_ray_runs_it(session, monkeypatch):
    """Ray sends a class of `__main__` by value: no hook would see it there."""
    program = ModuleType("verl.trainer.main_ppo_sync")
    program.TaskRunner = object()
    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo_sync", program)
    main = SimpleNamespace(run_ppo=lambda config, task_runner_class=None: task_runner_class)
    verl.install_main(session, main)
    assert main.run_ppo("config", task_runner_class="of main") == "of main"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="verl.trainer.main_ppo_sync"))
    assert main.run_ppo("config", task_runner_class="of main") is program.TaskRunner
    assert main.run_ppo("config") is None


def test_weights_are_kept_once_verl_has_loaded_them(session, padding, queue):
    """With param_offload the engine holds none before."""
    recorded(session, queue, ONE)
    engine = an_engine()
    loaded = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    for value in engine.module.parameters():
        value.data = torch.empty(0)

    def load():
        for name, value in engine.module.named_parameters():
            value.data = loaded[name]

    updated(session, engine=engine, load=load)
    kept = open_weights(Store(session.order.run)).load(3)
    assert {name: tensor.bits.tobytes() for name, tensor in kept.items()} == {
        name: value.numpy().tobytes() for name, value in loaded.items()
    }


def test_that_megatron_s_weights_are_not_recorded_is_said_with_what_to_do(session, padding, queue, capfd):
    recorded(session, queue, ONE)
    updated(session, strategy="megatron")
    (sentence,) = (found for found in info(session.order.run).missing if "megatron" in found)
    sentence = sentence.removeprefix("not recorded: ")
    assert "verl's strategy megatron uses its own tensor names and shards" in sentence
    assert "tim-trace weights RUN --attach VERSION" in sentence
    assert sentence in capfd.readouterr().err


def test_what_travels_with_an_update_does_not_stay_in_verl_s_batch(session):
    batch, seen = made_batch(), []
    hooks = TrainerHooks(session)
    hooks.update_actor(lambda trainer, batch, metrics: seen.append(dict(batch.extra_info)), a_trainer(), batch, {})
    assert seen[0][UPDATE_KEY]["left_out"] == ["pad_0_0"]
    assert batch.extra_info == {}


def test_a_sealed_recording_reads_as_finished(session, queue):
    recorded(session, queue, ONE)
    assert {writer.state for writer in info(session.order.run).writers} == {"finished"}


class OneStepOffRayTrainer(SimpleNamespace):
    """A trainer as verl's of this name counts."""


IN_STEP = {"global_steps": 4, "total_training_steps": 9}
FULLY = {"global_steps": 6, "trigger_parameter_sync_step": 2, "current_param_version": 2, "total_train_steps": 3}


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [
        (SimpleNamespace(**IN_STEP), (4, 3, 3, False, 2)),
        (SimpleNamespace(**IN_STEP, parameter_sync_step=3, local_trigger_step=2), (4, 11, 11, False, 6)),
        (
            SimpleNamespace(**IN_STEP, parameter_sync_step=3, local_trigger_step=2, standalone_checkpoint_manager=0),
            (4, 11, 9, False, 6),
        ),
        (OneStepOffRayTrainer(**IN_STEP), (4, 3, 3, False, 1)),
        (SimpleNamespace(**FULLY), (3, 5, 4, True, 4)),
        (SimpleNamespace(**FULLY | {"global_steps": 5}), (3, 4, 4, False, 4)),
        (SimpleNamespace(**FULLY | {"total_train_steps": None}), (3, 5, 4, False, 4)),
    ],
    ids=[
        "in step",
        "v1",
        "v1 separate_async",
        "one step off",
        "fully asynchronous",
        "before the last",
        "no end is known",
    ],
)
def test_steps_and_versions_are_counted_as_each_trainer_counts(trainer, wanted):
    """The step, the weights' version, that of the old logprobs, whether it is the last, and who sampled by transfer 2."""
    found = progress_of(trainer)
    assert (found.step, found.version, found.old_version, found.is_last, found.sampled_by(2)) == wanted
    assert found.sampled_by(None) is None


def test_padded_rows_have_the_transfer_of_the_oldest_weights_that_sampled_them():
    batch = SimpleNamespace(
        non_tensor_batch={
            "uid": np.array(["a", "b", "a"], object),
            "min_global_steps": np.array([0, 1, None], object),
        }
    )
    found = [(row.key, row.oldest_weights) for row in rows_of_padded(batch, None)]
    assert found == [("a_0_0", 0), ("b_0_0", 1), ("a_1_0", None)]
    assert {row.oldest_weights for row in rows_of_padded(batch, 3)} == {3}


def padded_batch(uids, oldest):
    """Rows of two prompt and three response tokens, as the trainers of before have them."""
    rows = len(uids)
    logprobs = -torch.arange(1.0, 1 + 3 * rows).reshape(rows, 3) / 10
    tensors = {
        "prompts": torch.full((rows, 2), 5),
        "responses": torch.full((rows, 3), 7),
        "attention_mask": torch.ones(rows, 5, dtype=torch.int64),
        "response_mask": torch.ones(rows, 3, dtype=torch.int64),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0]] * rows),
        "advantages": torch.full((rows, 3), 0.5),
        "rollout_log_probs": logprobs,
        "old_log_probs": logprobs - 0.25,
    }
    others = {"uid": np.array(uids, object), "min_global_steps": np.array(oldest, object)}
    return SimpleNamespace(batch=tensors, non_tensor_batch=others, meta_info={})


def test_the_fully_asynchronous_trainer_is_recorded_from_its_first_update_on(session):
    """Its `fit` is not hooked: what its updates are given tells all."""
    hooks, told = TrainerHooks(session), []
    hooks._describe = lambda trainer: session.recorder.describe(model={"name": "a-model"})
    counts = FULLY | {"total_train_steps": 1}
    trainer = SimpleNamespace(config=config(), tokenizer=SimpleNamespace(eos_token_id=END), **counts)
    for update, (uids, oldest) in enumerate([(["a", "a"], [0, 0]), (["b", "b"], [0, 1])]):
        trainer.global_steps, trainer.current_param_version = update + 1, update // 2
        batch = padded_batch(uids, oldest)
        hooks.update_older_actor(lambda trainer, batch: told.append(batch.meta_info[UPDATE_KEY]), trainer, batch)
        assert UPDATE_KEY not in batch.meta_info
    hooks.log(lambda tracking, data, step: None, None, data={"loss": 0.5}, step=1)
    assert {writer.state for writer in info(session.order.run).writers} == {"finished"}
    assert [(each["step"], each["policy_version"], each["keys"]) for each in told] == [
        (1, 0, ["a_0_0", "a_1_0"]), (1, 1, ["b_0_0", "b_1_0"]),
    ]  # fmt: skip
    trace = connect(session.order.run)
    # Transfer 1 is that after the second update.
    query = "SELECT seq_id, step, policy_version, reward, attempt FROM sequences ORDER BY seq_id"
    assert rows(trace, query) == [
        ("a_0_0", 1, 0, 1.0, 1), ("a_1_0", 1, 0, 1.0, 1), ("b_0_0", 1, 0, 1.0, 1), ("b_1_0", 1, 2, 1.0, 1),
    ]  # fmt: skip
    query = "SELECT DISTINCT pass, policy_version FROM scores ORDER BY ALL"
    assert rows(trace, query) == [("rollout", 0), ("rollout", 2), ("train", 0)]
    assert rows(trace, "SELECT step, value FROM metrics WHERE name = 'loss'") == [(1, 0.5)]


def test_a_wrapped_coroutine_function_is_one():
    """Ray makes an actor with such functions an asynchronous one."""

    class Worker:
        async def update_weights(self, step):
            return step + 1

    patches = Patches()
    patches.wrap(Worker, "update_weights", lambda original, worker, step: original(worker, 10 * step))
    assert inspect.iscoroutinefunction(Worker.update_weights)
    assert asyncio.run(Worker().update_weights(2)) == 21
    patches.restore()
    assert asyncio.run(Worker().update_weights(2)) == 3


def test_made_up_rows_are_left_out():
    assert [row.key for row in rows_of(made_batch())] == ["a-b_0_0", "a-b_1_0", "c_0_0"]
    assert [row.group_id for row in rows_of(made_batch())] == ["a-b", "a-b", "c"]


def test_columns_are_read_from_nested_and_from_padded_tensors():
    chosen = rows_of(made_batch())[:2]
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [row.tolist() for row in column({"x": whole}, "x", chosen)] == [[1.0, 2.0], [3.0, 4.0]]
    assert [row.tolist() for row in column({"x": nested([1.0], [2.0, 3.0])}, "x", chosen)] == [[1.0], [2.0, 3.0]]
    assert column({}, "x", chosen) is None


def test_a_row_without_a_counted_token_has_no_advantage_to_differ():
    values, masks = [np.float32([1, 2]), np.float32([3, 3])], [np.array([0, 0]), np.array([1, 1])]
    assert one_a_row(values, masks).tolist() == [0.0, 3.0]


def test_finish_reasons_are_told_where_tokens_tell_them():
    assert finish_reasons([np.array([5, 1]), np.array([5, 5, 5]), np.array([5]), np.array([])], [1], 3) == [
        "stop", "length", None, None,
    ]  # fmt: skip


def test_settings_have_dotted_names():
    assert flat({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": 1, "a.c.d": None, "e": [1]}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {},
            {
                "kind": "ppo_clip",
                "clip_high": 0.28,
                "clip_hard": 3.0,
                "aggregation": "token_mean",
                "denominator": "train",
            },
        ),
        ({"use_kl_loss": True}, {"kl_coefficient": 0.001}),
        ({"loss_agg_mode": "seq-mean-token-sum"}, {"aggregation": "sequence_sum"}),
        ({"correction": {"bypass_mode": True}}, {"denominator": "rollout"}),
        (
            {"correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}},
            {"correction": "token_truncate", "correction_high": 2.0},
        ),
        ({"policy_loss": settings({"loss_mode": "gspo"})}, {"level": "sequence_mean", "clip_hard": None}),
    ],
)
def test_verl_s_loss_is_read_off_its_settings(changes, wanted):
    loss, _ = policy_loss(config(**changes))
    assert {name: getattr(loss, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_loss": settings({"loss_mode": "clip_cov"})},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        {"use_kl_loss": True, "kl_loss_type": "abs"},
    ],
)
def test_a_loss_that_is_not_known_is_not_said(changes):
    assert policy_loss(config(**changes)) == (None, {})


def test_ray_s_workers_get_the_order_and_find_our_sitecustomize_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{BOOTSTRAP}:/mine")
    given = {"env_vars": {"A": "1"}, "working_dir": "/w"}
    made = with_order(given, "{}")
    assert made == {"env_vars": {"A": "1", ENVIRONMENT: "{}", "PYTHONPATH": f"{BOOTSTRAP}:/mine"}, "working_dir": "/w"}
    assert given == {"env_vars": {"A": "1"}, "working_dir": "/w"}
    assert with_order({"env_vars": {"PYTHONPATH": "/job"}}, "{}")["env_vars"]["PYTHONPATH"] == f"{BOOTSTRAP}:/job"
    assert with_order(None, "{}")["env_vars"][ENVIRONMENT] == "{}"


def test_a_runtime_environment_keeps_its_class():
    class RuntimeEnv(dict):
        pass

    assert type(with_order(RuntimeEnv(pip=["a"]), "{}")) is RuntimeEnv


class AsyncLLM:
    """vLLM's serving engine as far as recording looks at one."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs"))

    async def generate(self, prompt, sampling_params, request_id):
        yield request_id

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return method


def test_a_serving_engine_declares_one_contract_for_each_sampling(session, monkeypatch):
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, vllm_async.VERL_SERVERS, ModuleType(vllm_async.VERL_SERVERS))

    def params(**values):
        return SimpleNamespace(
            **({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 5, "seed": None} | values)
        )

    async def serve(engine):
        done = [await engine.collective_rpc(method="monkey_patch_model", kwargs={"vocab_size": 35})]
        done.append(await engine.collective_rpc("update_weights"))
        for values in ({}, {"max_tokens": 7}, {"seed": 3}, {"temperature": 0.0}):
            done += [found async for found in engine.generate("p", params(**values), request_id="r")]
        return done

    patches = vllm_async.install(session, SimpleNamespace(AsyncLLM=AsyncLLM))
    try:
        assert asyncio.run(serve(AsyncLLM())) == ["monkey_patch_model", "update_weights", "r", "r", "r", "r"]
    finally:
        patches.restore()
    found = [json.loads(text) for (text,) in rows(connect(session.order.run), "SELECT contract_json FROM passes")]
    assert sorted(contract["sampling"]["temperature"] for contract in found) == [0.0, 1.0]
    patch = {"method": "monkey_patch_model", "arguments": {"vocab_size": 35}}
    assert all(contract["model_patches"] == [patch] for contract in found)
