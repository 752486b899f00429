"""Small models of several architectures, and a recorded step of each, to be looked into by `locate`."""

import numpy as np
import torch
import transformers
from adapted import identity
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

VOCAB, ROWS = 200, 9
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12}),
    "qwen3_moe": (
        "Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    ),
    "gpt_neox": ("GPTNeoX", {"eos_token_id": 1}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12}),
    "granite": (
        "Granite", {"num_key_value_heads": 2, "residual_multiplier": 0.22, "embedding_multiplier": 4.0, "logits_scaling": 2.0}
    ),
    "qwen2_moe": (
        "Qwen2Moe", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                     "shared_expert_intermediate_size": 48, "experts_implementation": "eager"}
    ),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 48, "eos_token_id": 1, "bos_token_id": 1}),
}  # fmt: skip

OF_OTHER_CODE = {
    "nemotron": ("Nemotron", {"num_key_value_heads": 2}),
    "gpt_oss": (
        "GptOss", {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12,
                   "experts_implementation": "eager"}
    ),
    "granite_shared": (
        "GraniteMoeShared", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
                             "shared_intermediate_size": 40, "experts_implementation": "eager"}
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}),
    "hunyuan": ("HunYuanDenseV1", {"num_key_value_heads": 2, "head_dim": 12}),
    "ernie_moe": (
        "Ernie4_5_Moe", {"num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
                         "moe_layer_start_index": 1, "moe_layer_interval": 1, "experts_implementation": "eager"}
    ),
    "gptj": ("GPTJ", {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 1}),
    "deepseek_v3": (
        "DeepseekV3", {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                       "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 8,
                       "topk_group": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "experts_implementation": "eager"}
    ),
}  # fmt: skip
"""A projection of gate and up at once, norms that add 1 to their weight, experts with a gate of their own, routers that give their choices first or choose among groups, an
attention of its own, norms behind the rotary,
routers that hold a module."""


def model_of(name):
    prefix, changes = (MODELS | OF_OTHER_CODE)[name]
    config = getattr(transformers, f"{prefix}TextConfig" if name == "gemma3" else f"{prefix}Config")(
        **SIZES, **changes, attn_implementation="eager"
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.5)
    return model


def recorded_once(tmp_path_factory):
    """A function of a model's name that records a step of it, and gives the same trace again."""
    made = {}

    def trace(name):
        if name not in made:
            made[name] = record(tmp_path_factory.mktemp(name) / "run", model_of(name), versions=2)
        return made[name]

    return trace


def record(folder, model, versions=1):
    """A step of nine sequences in forwards of three, padded on both sides."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(2, VOCAB, length) for length in draw.integers(3, 9, ROWS)]
    responses = [draw.integers(2, VOCAB, length) for length in draw.integers(12, 25, ROWS)]
    number = np.arange(ROWS)
    lengths = np.array([[len(ids) for ids in part] for part in (prompts, responses)])
    most = np.array([lengths[:, place - place % 3 : place - place % 3 + 3].max(1) for place in number]).T
    with Recorder(folder) as recorder:
        recorder.describe(model=identity(model))
        recorder.add_contract("train", {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": "eager"}})
        for version in range(versions):
            recorder.add_weights(version, {key: value + 1e-3 * version for key, value in model.state_dict().items()})
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts, response_ids=responses, policy_version=0, group_ids=[f"g{n}" for n in number],
            seq_ids=[f"s{n}" for n in number],
        )  # fmt: skip
        forward = Forward(
            ids=number // 3, places=(number % 3).astype("i4"), rows=np.full(ROWS, 3, np.int32),
            pad_left=(most - lengths)[0].astype("i4"), pad_right=(most - lengths)[1].astype("i4"),
        )  # fmt: skip
        recorder.add_scores(
            "train", batch, logprobs=[np.full(len(ids), -1.0, np.float32) for ids in responses], forward=forward
        )
    return folder
