"""Recording and replaying the router choices of a real mixture of experts. Bits are compared as bits."""

import shutil

import numpy as np
import pytest
import torch
from builders import tim_trace
from runs import train
from safetensors.torch import load_file
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends.model import build, load
from tim_trace.replay.engine import replay
from tim_trace.replay.recorded import RecordedRun
from tim_trace.replay.results import by_arm
from tim_trace.schemas.errors import CannotReplay, InvalidOption, NothingToCompare
from tim_trace.tracer.weights.checkpoints import open_weights

pytestmark = pytest.mark.engine

ROUTED = {"capture": "logprobs", "options": ("--routing",)}
OFF_POLICY = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "beta": 0.1}
MIXED = {"bf16": True}

of_trainings = pytest.mark.parametrize(
    ("arguments", "config"),
    [
        pytest.param((), {}, id="on-policy"),
        pytest.param(("--steps", "4"), OFF_POLICY, id="off-policy"),
        pytest.param((), MIXED, id="mixed-precision", marks=pytest.mark.slow),
        pytest.param(("--experts", "eager"), {}, id="eager-experts", marks=pytest.mark.slow),
    ],
)


def copy(run, tmp_path):
    shutil.copytree(run.trace, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def trace(tmp_path):
    """A copy of a recorded run of a tiny Qwen3-MoE, its middle layer dense."""
    return copy(train("--moe", **ROUTED), tmp_path)


def rows(trace, query):
    return connect(trace).execute(query).fetchall()


@pytest.mark.slow
def test_recording_routers_changes_no_bit_of_the_training():
    assert train("--moe", **ROUTED).result["weights"] == train("--moe").result["weights"]


@pytest.mark.slow
@of_trainings
def test_recorded_choices_are_those_of_a_forward_of_our_own(arguments, config, tmp_path):
    """Rebuilt without our scorers: each sequence by itself, unpadded, through hooks of this test."""
    trace = copy(train("--moe", *arguments, **ROUTED, **({"config": config} if config else {})), tmp_path)
    run, heard = RecordedRun(trace), []
    experts = run.contract("train", run.step(1)[0].contract)["model"]["experts"]
    assert experts == ("eager" if "--experts" in arguments else "grouped_mm")
    model = build(run.model, dtype="float32", attention="sdpa", device="cpu", experts=experts)
    for index in (0, 2):
        model.model.layers[index].mlp.gate.register_forward_hook(lambda *call: heard.append(call[2]))
    same = total = 0
    for step in run.steps("train"):
        recorded = run.step(step)
        for row, routing in zip(recorded, run.routing(recorded), strict=True):
            load(model, open_weights(run.store).load(row.policy_version), None)
            heard.clear()
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=config == MIXED):
                model(ids[None])
            ours = np.stack([output[2].numpy() for output in heard], axis=1)
            weights = np.stack([output[1].float().numpy() for output in heard], axis=1)
            assert routing.expert_ids.shape == ours.shape == (len(ids), 2, 4)
            assert routing.expert_ids.dtype == np.int8
            same += int((routing.expert_ids == ours).sum())
            total += ours.size
            # Kernels on one row and on a padded batch differ in the last digits.
            assert np.allclose(
                np.sort(routing.expert_weights), np.sort(weights), atol=5e-3 if config == MIXED else 1e-5
            )
    assert same == total if config != MIXED else same > 0.95 * total


@pytest.mark.slow
@of_trainings
def test_a_mixture_of_experts_replays_bit_for_bit_free_and_forced(arguments, config, tmp_path):
    trace = copy(train("--moe", *arguments, **ROUTED, **({"config": config} if config else {})), tmp_path)
    free, forced = by_arm(replay(trace, routing="recorded"))
    assert (free.arm, forced.arm) == ("as-recorded", "routing-recorded")
    assert free.share_equal == forced.share_equal == 1.0
    for name in ("as-recorded", "routing-recorded"):
        found = rows(
            trace, f"SELECT min(share_same_order), max(mean_abs_dweight) FROM pair_routing('replay/{name}', 'train')"
        )
        assert found == [(1.0, 0.0)]


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """Several arms on one recording, in one call."""
    trace = tmp_path_factory.mktemp("routed") / "run"
    shutil.copytree(train("--moe", **ROUTED).trace, trace)
    changes = [
        "dtype=bf16",
        "dtype=fp64",
        "mode=decode",
        "mode=chunked:2",
        "padding=right",
        "padding=packed",
        "batch-size=3",
    ]
    texts = [text + end for text in changes for end in ("", ",routing=recorded")]
    return trace, {result.arm: result for result in by_arm(replay(trace, arm=texts))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["bf16", "fp64", "decode", "chunked-2", "padding-right", "padding-packed", "batch-size-3"]
)
def test_forced_routers_choose_what_was_recorded_under_every_change(change, arms):
    trace, results = arms
    name = next(arm for arm in results if change in arm and "routing" in arm)
    query = (
        f"SELECT min(share_same_order), min(mean_overlap), sum(num_tokens) FROM pair_routing('replay/{name}', 'train')"
    )
    tokens = rows(trace, "SELECT 2 * sum(num_prompt_tokens + num_response_tokens) FROM sequences")[0][0]
    assert rows(trace, query) == [(1.0, 1.0, tokens)]
    assert results[name].steps_reproduced == results[name].num_steps


@pytest.mark.slow
def test_bf16_chooses_other_experts_unless_it_is_forced(arms):
    trace, results = arms
    free, forced = (
        {row["step"]: row["routing_agreement"] for row in stats(trace, pair=f"replay/{name}:train", by="step").dicts()}
        for name in ("bf16", "bf16+routing-recorded")
    )
    assert set(forced.values()) == {1.0}
    assert min(free.values()) < 1.0
    assert results["bf16"].mean_abs_d != results["bf16+routing-recorded"].mean_abs_d
    (agreement,) = (row["routing_agreement"] for row in stats(trace, pair="replay/bf16:train").dicts())
    assert 0.9 < agreement < 1.0
    layers = stats(trace, pair="replay/bf16:train", by="layer").dicts()
    assert [row["layer"] for row in layers] == [0, 2]
    assert sum(row["share_same_experts"] for row in layers) / 2 == pytest.approx(agreement)


@pytest.mark.slow
def test_which_tokens_were_sent_elsewhere_can_be_asked(arms):
    trace, _ = arms
    ((tokens, joined, flipped),) = rows(
        trace,
        """SELECT (SELECT sum(num_response_tokens) FROM sequences), count(*), count(*) FILTER (num_layers_differing > 0)
        FROM pair_routing_tokens('replay/bf16', 'train')
        JOIN pair('replay/bf16', 'train') USING (run, step, seq_id, iteration_a, iteration_b, position)""",
    )
    assert tokens == joined > flipped


@pytest.mark.slow
def test_routing_is_refused_where_it_cannot_be(trace, tmp_path):
    with pytest.raises(InvalidOption, match="routing: vLLM does not support this option"):
        Arm(engine="vllm", routing="recorded")
    with pytest.raises(InvalidOption, match=r"compile: .*router choices cannot be forced inside a compiled backbone"):
        Arm(compile=True, routing="recorded")
    with pytest.raises(InvalidOption, match=r"routing: got 'rollout'; use recorded"):
        Arm(routing="rollout")
    dense = copy(train(capture="logprobs"), tmp_path / "dense")
    with pytest.raises(CannotReplay, match="not a mixture of experts"):
        replay(dense, routing="recorded")
    with pytest.raises(NothingToCompare, match="has no router choices"):
        stats(trace, pair="train:current", by="layer")
    assert not rows(dense, "SELECT 1 FROM scores WHERE routing IS NOT NULL")


@pytest.mark.slow
def test_without_routing_one_notice_says_how_to_record_it(tmp_path):
    run = train("--moe", capture="logprobs")
    assert run.done.stderr.count("router choices are not recorded") == 1
    assert "record with --routing (about 48 bytes per token)" in run.done.stderr
    done = tim_trace("replay", copy(run, tmp_path), "--routing", "recorded")
    assert done.code == 2
    assert "has no router choices for pass 'train'; record them with tim-trace record --routing" in done.stderr


@pytest.mark.slow
def test_a_replaced_arm_leaves_none_of_its_routing(trace):
    replay(trace, steps="1")
    before = {path.name for path in (trace / "dense").iterdir()}
    replay(trace, steps="1", force=True)
    assert len({path.name for path in (trace / "dense").iterdir()}) == len(before) == 2


@pytest.mark.slow
def test_a_mixture_s_weights_are_kept_and_exported(trace, tmp_path):
    from transformers import AutoModelForCausalLM

    run = train("--moe", **ROUTED)
    done = tim_trace("weights", trace, "--verify", "--json")
    assert done.code == 0, done.stderr
    assert [row["version"] for row in done.json()] == [0, 1, 2]
    done = tim_trace("weights", trace, "--export", "0", tmp_path / "exported")
    assert done.code == 0, done.stderr
    ours, initial = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "exported", run.trace.parent / "model")
    )
    assert ours.keys() == initial.keys()
    assert all(torch.equal(ours[name], initial[name]) for name in ours)
    assert load_file(tmp_path / "exported" / "model.safetensors")


@pytest.mark.slow
def test_vllm_computes_with_each_version_s_experts(trace):
    done = tim_trace("replay", trace, "--engine", "vllm", "--dtype", "fp32", "--steps", "2:3", "--json")
    assert done.code == 0, done.stderr
    steps = [row for row in done.json() if row["arm"] == "vllm+fp32"]
    assert [row["step"] for row in steps] == [2, 3]
    # Kernels apart; a step's updates move logprobs by 1e-3 and more.
    assert max(row["max_abs_d"] for row in steps) < 1e-5
