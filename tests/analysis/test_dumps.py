"""Two folders of dumped tensors: names and layouts of other tools are brought together, and the first jump is named."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from builders import tim_trace
from tim_trace.analysis.dumps.compare import dumps_rows, locate_dumps
from tim_trace.analysis.dumps.difference import difference
from tim_trace.analysis.dumps.layout import DumpTokens, Unmatched, joined, reconciled
from tim_trace.analysis.dumps.names import place_of
from tim_trace.analysis.dumps.text import dumps_text, sentence
from tim_trace.schemas.errors import ImportFailed, NothingToCompare

IDS = torch.randint(2, 200, (2, 24), generator=torch.Generator().manual_seed(0))
HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 128


def model_of(dtype=torch.float32, attention="eager"):
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=200, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def forward(model, ids=IDS, mask=None):
    """What every module of the model gives: its name -> tensor, in the order of the forward."""
    given = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})

    def keep(name):
        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, torch.Tensor):
                given[name] = output.detach().clone()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return given


def save(folder, tensors):
    folder.mkdir(parents=True)
    for name, tensor in tensors.items():
        torch.save(tensor, folder / f"{name}.pt")
    return folder


def save_sglang(folder, tensors, rank=0, step=0, start=0):
    """As SGLang's dumper writes: tags in the name, {"value", "meta"} in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, tensor) in enumerate(tensors.items(), start + 1):
        full = name if name in ("input_ids", "positions") else f"non_intrusive__{name}.output"
        tags = {"step": step, "rank": rank, "dump_index": index, "name": full, "recompute_status": "disabled"}
        stem = "___".join(f"{key}={value}" for key, value in tags.items())
        torch.save({"value": tensor, "meta": tags | {"world_rank": rank, "world_size": 2}}, folder / f"{stem}.pt")
    return folder


def packed(tensors):
    """A forward of [B, T, ...] as an engine has it: [B * T, ...]."""
    return {name: tensor.flatten(0, 1) if tensor.ndim == 3 else tensor.flatten() for name, tensor in tensors.items()}


def fused(tensors, ranks=1):
    """The projections as an engine has them, on each of `ranks`: q, k and v side by side, gate and up too."""
    shards = []
    for rank in range(ranks):
        own = {}
        for name, tensor in tensors.items():
            if name.endswith("q_proj"):
                parts = [
                    tensors[name.replace("q_proj", part)].chunk(ranks, -1)[rank]
                    for part in ("q_proj", "k_proj", "v_proj")
                ]
                own[name.replace("q_proj", "qkv_proj")] = torch.cat(parts, -1)
            elif name.endswith("gate_proj"):
                parts = [tensors[name.replace("gate", part)].chunk(ranks, -1)[rank] for part in ("gate", "up")]
                own[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts, -1)
            elif not name.endswith(("k_proj", "v_proj", "up_proj", "act_fn")):
                own[name] = tensor
        shards.append(own)
    return shards


@pytest.fixture(scope="module")
def exact():
    return forward(model_of())


@pytest.fixture(scope="module")
def rounded():
    return forward(model_of(torch.bfloat16))


def other_norm(model):
    model.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-2


def other_rotary(model):
    attention = model.model.layers[2].self_attn
    original = attention.forward

    def turned(*args, position_embeddings, **keywords):
        return original(*args, position_embeddings=tuple(part.roll(1, 1) for part in position_embeddings), **keywords)

    attention.forward = turned


def other_scale(model):
    model.model.layers[2].self_attn.scaling *= 1.1


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (other_norm, "layers.2.post_attention_layernorm"),
        (other_rotary, "layers.2.self_attn.o_proj"),
        (other_scale, "layers.2.self_attn.o_proj"),
    ],
)
def test_what_is_planted_in_a_layer_is_named_first(tmp_path, exact, fault, place):
    model = model_of()
    fault(model)
    found = locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", forward(model)))
    assert found.first.place == place
    assert found.first.why == "beyond"
    assert found.before.rms == 0
    assert f"is {place}: " in sentence(found)


@pytest.mark.parametrize(
    ("changes", "with_rounded"),
    [
        ({"attention": "sdpa"}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"dtype": torch.float16, "attention": "sdpa"}, False),
        ({"dtype": torch.bfloat16, "attention": "sdpa"}, True),
    ],
)
def test_another_dtype_and_another_kernel_are_rounding(tmp_path, exact, rounded, changes, with_rounded):
    a = save(tmp_path / "a", rounded if with_rounded else exact)
    found = locate_dumps(a, save(tmp_path / "b", forward(model_of(**changes))))
    assert found.first is None
    assert len(found.tensors) == len(exact)
    assert (found.only_a, found.only_b, found.not_compared) == ((), (), ())
    assert max(row.rms for row in found.tensors if row.rms is not None) > 0


def test_a_wrong_rotary_is_seen_in_bfloat16_too(tmp_path, rounded):
    model = model_of(torch.bfloat16)
    other_rotary(model)
    found = locate_dumps(save(tmp_path / "a", rounded), save(tmp_path / "b", forward(model)))
    assert found.first.place == "layers.2.self_attn.o_proj"


def test_weights_of_a_bfloat16_checkpoint_make_no_bfloat16_model(tmp_path):
    models = [model_of(torch.bfloat16).float() for _ in "ab"]
    other_norm(models[1])
    a, b = (save(tmp_path / name, forward(model)) for name, model in zip("ab", models, strict=True))
    assert locate_dumps(a, b).first.place == "layers.2.post_attention_layernorm"


def test_numbers_saved_in_float32_have_the_precision_that_they_were_computed_in(tmp_path, exact, rounded):
    upcast = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in rounded.items()}
    found = locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", upcast))
    assert found.first is None
    assert found.tensors[-1].dtype_b == "float32"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_s_fused_packed_and_sharded_tensors_meet_the_trainer_s(tmp_path, exact, num_ranks):
    a = save(tmp_path / "a", exact)
    for rank, tensors in enumerate(fused(packed(exact), num_ranks)):
        save_sglang(tmp_path / "b", tensors, rank=rank)
    found = locate_dumps(a, tmp_path / "b")
    assert found.order == "dump_index of b"
    assert found.tokens_checked
    assert not found.not_compared
    assert {row.place.rpartition(".")[2] for row in found.tensors} >= {
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
    }
    assert all(row.rms in (0, None) for row in found.tensors)
    assert found.only_a == tuple(f"model.layers.{layer}.mlp.act_fn" for layer in range(4))
    assert found.only_b == ()


def test_a_fault_in_a_fused_projection_is_that_of_its_part(tmp_path, exact):
    (engine,) = fused(packed(exact))
    name = "model.layers.1.self_attn.qkv_proj"
    engine[name] = engine[name].clone()
    engine[name][:, HIDDEN : HIDDEN + 16] *= 1.01
    found = locate_dumps(save(tmp_path / "a", exact), save_sglang(tmp_path / "b", engine))
    assert found.first.place == "layers.1.self_attn.k_proj"
    assert found.first.name_b == f"non_intrusive__{name}.output"
    assert found.before.place == "layers.1.self_attn.q_proj"


def test_a_residual_that_an_engine_keeps_apart_is_added(tmp_path, exact):
    engine = packed(exact)
    residual = torch.randn_like(engine["model.layers.0"])
    for layer in range(4):
        whole = engine.pop(f"model.layers.{layer}")
        engine[f"model.layers.{layer}"] = (whole - residual, residual)
    found = locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", engine))
    assert found.first is None
    assert sum(" + " in row.name_b for row in found.tensors) == 4


def test_padding_is_left_out_where_the_mask_is_dumped(tmp_path):
    model, mask = model_of(), torch.ones_like(IDS)
    mask[0, :5] = 0
    padded = forward(model, IDS, mask)
    alone = [forward(model, IDS[:1, 5:]), forward(model, IDS[1:])]
    engine = {name: torch.cat([each[name][0] for each in alone]) for name in alone[0] if "rotary" not in name}
    found = locate_dumps(save(tmp_path / "a", padded), save(tmp_path / "b", engine))
    assert found.first is None, sentence(found)
    assert found.tokens_checked
    assert len(found.tensors) == len(engine)
    (tmp_path / "a" / "attention_mask.pt").unlink()
    with pytest.raises(NothingToCompare, match=r"a has 48 tokens and b 43.*attention_mask"):
        locate_dumps(tmp_path / "a", tmp_path / "b")


def test_other_tokens_are_no_comparison(tmp_path, exact):
    other = exact | {"input_ids": IDS.clone()}
    other["input_ids"][1, 3] += 1
    with pytest.raises(NothingToCompare, match="input_ids differ from token 27 on"):
        locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", other))


def test_what_is_not_finite_is_named_first(tmp_path, exact):
    model = model_of()
    other_norm(model)
    broken = forward(model)
    broken["model.layers.3.mlp.down_proj"][0, 2, 5] = float("nan")
    found = locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", broken))
    assert (found.first.place, found.first.why, found.first.num_nonfinite_b) == (
        "layers.3.mlp.down_proj",
        "nonfinite",
        1,
    )
    assert "0 values of a and 1 of b" in sentence(found)


def test_infinities_in_the_same_place_are_a_mask():
    a = np.array([[1.0, -np.inf], [2.0, 3.0]], np.float32)
    assert difference(a, a).num_nonfinite_a == 0
    assert difference(a, np.where(np.isinf(a), 0, a)).num_nonfinite_a == 1


def test_forwards_are_matched_by_their_order(tmp_path, exact):
    later = forward(model_of(), IDS.flip(1))
    for name, step in (("a", 0), ("b", 5)):
        save_sglang(tmp_path / name, exact, step=step)
        save_sglang(tmp_path / name, later, step=step + 9, start=1000)
    found = locate_dumps(tmp_path / "a", tmp_path / "b")
    assert {row.forward for row in found.tensors} == {0, 1}
    assert len(found.tensors) == 2 * len(exact)
    assert all(row.rms in (0, None) for row in found.tensors)


def test_files_of_every_kind_hold_the_same(tmp_path, rounded):
    tensors = {name: tensor for name, tensor in rounded.items() if tensor.is_floating_point()}
    a = save(tmp_path / "a", tensors)
    (tmp_path / "one").mkdir()
    torch.save(tensors, tmp_path / "one" / "all.pt")
    (tmp_path / "named").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "named" / "all.safetensors")
    (tmp_path / "arrays").mkdir()
    for name, tensor in tensors.items():
        np.save(tmp_path / "arrays" / f"{name}.npy", tensor.float().numpy())
    (tmp_path / "zipped").mkdir()
    np.savez(tmp_path / "zipped" / "all.npz", **{name: tensor.float().numpy() for name, tensor in tensors.items()})
    for kind in ("one", "named", "arrays", "zipped"):
        found = locate_dumps(a, tmp_path / kind)
        assert len(found.tensors) == len(tensors), kind
        assert all(row.rms == 0 for row in found.tensors), kind


def test_names_of_msprobe_come_in_the_order_of_its_dump_json(tmp_path, exact):
    """Files and names as msprobe 26.2 wrote them of such a model at level L0."""
    kinds = {
        "embed_tokens": "Embedding",
        "lm_head": "Linear",
        "norm": "LlamaRMSNorm",
        "mlp": "LlamaMLP",
        "self_attn": "LlamaAttention",
    }
    folder = tmp_path / "b" / "step0" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    data = {}
    for name, tensor in reversed(exact.items()):
        if name in ("input_ids", "model.rotary_emb", "model"):
            continue
        last = name.rpartition(".")[2]
        module = f"Module.{name}.{kinds.get(last, 'Linear' if 'proj' in last else 'LlamaDecoderLayer')}.forward.0"
        torch.save(tensor, folder / "dump_tensor_data" / f"{module}.output.0.pt")
        torch.save(tensor[0, 0], folder / "dump_tensor_data" / f"{module}.parameters.weight.pt")
        data[module] = {"input_args": [], "output": [{"data_name": f"{module}.output.0.pt"}]}
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "data": data}))
    found = locate_dumps(save(tmp_path / "a", exact), tmp_path / "b")
    assert found.order == "dump.json of b"
    assert [row.place for row in found.tensors[:2]] == ["lm_head", "norm"]
    assert len(found.tensors) == found.num_gradients == len(data)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"),
        ("module.decoder.layers.3.self_attention.linear_qkv.output", "layers.3.self_attn.qkv_proj"),
        ("decoder.layers.3.mlp.linear_fc2.output.0", "layers.3.mlp.down_proj"),
        ("decoder.final_layernorm", "norm"),
        ("embedding.word_embeddings", "embed_tokens"),
        ("non_intrusive__model.layers.3.mlp.gate_up_proj.output", "layers.3.mlp.gate_up_proj"),
        ("Module.model.layers.3.input_layernorm.LlamaRMSNorm.forward.0.output.0", "layers.3.input_layernorm"),
        ("Module.model.LlamaModel.forward.0.kwargs.input_ids", "input_ids"),
        ("model.layers.3.self_attn.o_proj.inputs.0", "layers.3.self_attn.attention"),
        ("model.layers.3", "layers.3"),
        ("model.layers.3.0", "layers.3"),
        ("model.layers.3.output.1", "layers.3.output.1"),
        ("output_layer", "lm_head"),
    ],
)
def test_a_name_is_a_place(name, place):
    assert str(place_of(name)[0]) == place


def test_the_layer_that_sglang_says_counts(tmp_path):
    assert str(place_of("layer_start", 3)[0]) == "layers.3.layer_start"


def test_layouts_that_nothing_tells_apart_are_refused():
    a = np.arange(24.0).reshape(2, 3, 4)
    with pytest.raises(Unmatched, match="dump input_ids on both sides"):
        reconciled(a, a.reshape(6, 4), None, None)
    turned = reconciled(a, a.swapaxes(0, 1), None, None)
    assert np.array_equal(*turned)
    square = np.arange(36.0).reshape(3, 3, 4)
    tokens = DumpTokens.of(np.arange(9).reshape(3, 3), None)
    with pytest.raises(Unmatched, match="axes cannot be told apart"):
        reconciled(square, square, tokens, tokens)


def test_shards_are_joined_on_the_axis_that_fits_or_refused():
    whole = np.arange(32.0).reshape(4, 8)
    assert np.array_equal(joined(np.split(whole, 2, 1), whole.shape), whole)
    assert np.array_equal(joined(np.split(whole, 2, 0), whole.shape), whole)
    assert np.array_equal(joined([whole, whole.copy()], whole.shape), whole)
    with pytest.raises(Unmatched, match="sums that were not reduced"):
        joined([whole, whole + 1], whole.shape)
    with pytest.raises(Unmatched, match="fits no axis"):
        joined(np.split(whole, 4, 1)[:3], whole.shape)
    with pytest.raises(Unmatched, match="fits 2 axes"):
        joined([np.zeros((2, 2, 5)), np.ones((2, 2, 5))], (5, 4, 2))


def test_unmatched_names_are_listed(tmp_path, exact):
    left = {name: tensor for name, tensor in exact.items() if "layers.3" not in name}
    found = locate_dumps(save(tmp_path / "a", exact), save(tmp_path / "b", left))
    assert len(found.only_a) == len(exact) - len(left)
    assert f"only in a     {len(found.only_a)}: " in dumps_text(found)
    assert len(dumps_rows(found, "layer")) == 4
    with pytest.raises(NothingToCompare, match="no name in common"):
        locate_dumps(save(tmp_path / "c", {"x": torch.ones(2)}), save(tmp_path / "d", {"y": torch.ones(2)}))


class _Hostile:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_file_is_named_and_not_run(tmp_path, exact, protocol):
    a, b = save(tmp_path / "a", exact), save(tmp_path / "b", exact)
    content = pickle.dumps(_Hostile(tmp_path / "ran"), protocol)
    (b / "lm_head.pt").write_bytes(content)
    with pytest.raises(ImportFailed, match=r"lm_head\.pt: uses .*system.*nothing in it was run"):
        locate_dumps(a, b)
    torch.save({"value": _Hostile(tmp_path / "ran"), "meta": {}}, b / "lm_head.pt")
    with pytest.raises(ImportFailed, match="system"):
        locate_dumps(a, b)
    assert not (tmp_path / "ran").exists()


def test_an_array_of_objects_is_not_read(tmp_path):
    a = save(tmp_path / "a", {"x": torch.ones(2)})
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b" / "x.npy", np.array([_Hostile(tmp_path / "ran")], object), allow_pickle=True)
    with pytest.raises(ImportFailed, match=r"x\.npy"):
        locate_dumps(a, tmp_path / "b")
    assert not (tmp_path / "ran").exists()


def test_links_are_not_followed(tmp_path, exact):
    a, b = save(tmp_path / "a", exact), save(tmp_path / "b", {"lm_head": exact["lm_head"]})
    outside = tmp_path / "outside.pt"
    torch.save(torch.ones(2), outside)
    (b / "model.norm.pt").symlink_to(outside)
    with pytest.raises(ImportFailed, match=r"model\.norm\.pt: is a link"):
        locate_dumps(a, b)
    (b / "model.norm.pt").unlink()
    os.mkfifo(b / "model.norm.pt")
    with pytest.raises(ImportFailed, match="not a regular file"):
        locate_dumps(a, b)


@pytest.mark.parametrize("suffix", ["pt", "npy", "npz", "safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.97])
def test_a_cut_file_is_named(tmp_path, suffix, share):
    a, b = (save(tmp_path / name, {}) for name in "ab")
    tensors = {"x": torch.randn(40, 50), "y": torch.randn(40, 50)}
    for folder in (a, b):
        path = folder / f"x.{suffix}"
        if suffix == "pt":
            torch.save(tensors, path)
        elif suffix == "npy":
            np.save(path, tensors["x"].numpy())
        elif suffix == "npz":
            np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
        else:
            safetensors.torch.save_file(tensors, path)
    assert locate_dumps(a, b).first is None
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ImportFailed, match=rf"x\.{suffix}"):
        locate_dumps(a, b)


@pytest.mark.parametrize("header", [b"[]", b"[" * 5000, b'{"x": 3}', b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
                                    b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99]}}',
                                    b'{"x": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}'])  # fmt: skip
def test_a_forged_safetensors_header_is_named(tmp_path, header):
    a = save(tmp_path / "a", {"x": torch.ones(1)})
    b = save(tmp_path / "b", {})
    (b / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ImportFailed, match=r"x\.safetensors"):
        locate_dumps(a, b)


def test_the_command_says_it_and_refuses_what_is_not_for_dumps(tmp_path, exact):
    model = model_of()
    other_norm(model)
    a, b = save(tmp_path / "a", exact), save(tmp_path / "b", forward(model))
    done = tim_trace("locate", "--from-dumps", a, b, "--json")
    assert done.code == 1, done.stderr
    assert json.loads(done.stdout)["first"]["place"] == "layers.2.post_attention_layernorm"
    done = tim_trace("locate", "--from-dumps", a, b, "--limit", "5")
    assert done.stdout.startswith(
        "The first difference that rounding does not explain is layers.2.post_attention_layernorm"
    )
    assert len(done.stdout.split("\n\n")[2].splitlines()) == 7
    assert tim_trace("locate", "--from-dumps", a, a, "--by", "layer", "--csv").code == 0
    for arguments, message in (
        (("--from-dumps", a, b, "--steps", "3"), "--steps is not supported"),
        (("run", "--from-dumps", a, b), "run is not supported"),
        (("--from-dumps", a, b, "--by", "patch"), "--by operator or layer"),
        ((), "give RUN, or two folders"),
        (("--from-dumps", a, tmp_path / "none"), "is not a folder"),
    ):
        done = tim_trace("locate", *arguments)
        assert (done.code, message in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_vllm_s_modules_meet_transformers(tmp_path):
    program = Path(__file__).parents[1] / "programs" / "module_dumps.py"
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = locate_dumps(tmp_path / "trainer", tmp_path / "engine")
    assert found.first is None, sentence(found)
    assert found.tokens_checked
    places = {row.place for row in found.tensors}
    assert places >= {f"layers.1.{name}" for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp")}
    assert {"layers.0", "layers.1", "norm", "embed_tokens"} <= places
    assert [each.place for each in found.not_compared] == [
        "lm_head"
    ]  # vLLM computes the logits of the last token alone
    found = locate_dumps(tmp_path / "trainer", tmp_path / "other")
    assert found.first.place == "layers.1.post_attention_layernorm"


def test_what_is_no_tensor_of_numbers_is_not_judged(tmp_path):
    tensors = {
        "x": torch.ones(3, 4),
        "empty": torch.ones(0, 4),
        "layers.0.mlp.topk_ids": torch.tensor([[1, 2], [3, 4]]),
    }
    others = tensors | {"layers.0.mlp.topk_ids": torch.tensor([[1, 2], [4, 3]])}
    a, b = save_sglang(tmp_path / "a", tensors | {"seq_len": 7}), save_sglang(tmp_path / "b", others | {"seq_len": 7})
    found = locate_dumps(a, b)
    assert {each.place: each.reason for each in found.not_compared} == {
        "empty": "it has no values", "seq_len": "the dumped value is not a tensor",
    }  # fmt: skip
    assert [(row.place, row.num_different) for row in found.tensors] == [("x", None), ("layers.0.mlp.topk_ids", 2)]
    assert found.first is None
    assert "1 tensors of integers differ, first layers.0.mlp.topk_ids" in sentence(found)


def test_positions_that_differ_are_a_divergence(tmp_path):
    a = save(tmp_path / "a", {"positions": torch.arange(6)[None], "x": torch.ones(6, 4)})
    b = save(tmp_path / "b", {"position_ids": torch.arange(6) + (torch.arange(6) > 3), "x": torch.ones(6, 4)})
    found = locate_dumps(a, b)
    assert (found.first.place, found.first.why, found.first.num_different) == ("positions", "differs", 2)
