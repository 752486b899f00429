"""The planted faults."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fourth_common import *
from fourth_common import Hooks, OwnAttn
from fourth_models import make_inputs


def gen(seed):
    return torch.Generator().manual_seed(seed)


def set_inv_freq(b, f, name="inv_freq"):
    r = b.model.rotary_emb
    old = getattr(r, name)
    setattr(r, name, f(old).clone())


def theta_freq(old, theta):
    n = old.numel()
    return 1.0 / (theta ** (torch.arange(0, 2 * n, 2).float() / (2 * n)))


def with_tables(attn, edit):
    """One attention gets other cos/sin tables."""
    base = base_forward(attn)

    def forward(self, hidden_states, position_embeddings=None, **kw):
        return base(self, hidden_states, position_embeddings=edit(*position_embeddings), **kw)

    swap(attn, forward=forward)


ROT0 = {"model.rotary_emb", L(0, "self_attn")}

# ============================================================================================================ rotary


@fault(
    "qwen2_theta_10002", "qwen2", ROT0, ROT, "theta 10002 instead of 10000 in the rotary table", also=("attn", "norm")
)
def _(b):
    set_inv_freq(b, lambda o: theta_freq(o, 10002.0))


@fault("qwen3_theta_one_layer", "qwen3", L(3, "self_attn"), ROT, "layer 3 alone uses tables of theta 10010")
def _(b):
    inv = theta_freq(b.model.rotary_emb.inv_freq, 10010.0)

    def edit(cos, sin):
        ang = torch.arange(cos.shape[1], device=cos.device)[None, :, None] * inv.to(cos.dtype)
        ang = torch.cat((ang, ang), -1)
        return ang.cos().to(cos.dtype), ang.sin().to(cos.dtype)

    with_tables(b.model.layers[3].self_attn, edit)


@fault("smollm3_inv_freq_bf16", "smollm3", ROT0, ROT, "inverse frequencies rounded to bfloat16", also=("attn",))
def _(b):
    set_inv_freq(b, lambda o: o.bfloat16().float())


@fault("gpt_oss_yarn_attention_factor", "gpt_oss", ROT0, ROT, "yarn's attention factor on cos and sin left out")
def _(b):
    b.model.rotary_emb.attention_scaling = 1.0


@fault(
    "gpt_oss_yarn_truncate",
    "gpt_oss",
    ROT0,
    ROT,
    "yarn's correction range truncated to whole dimensions",
    also=("norm",),
)
def _(b):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    c = copy.deepcopy(b.config)
    c.rope_parameters["truncate"] = True
    set_inv_freq(b, lambda o: ROPE_INIT_FUNCTIONS["yarn"](c, torch.device("cpu"))[0])


@fault("phi3_partial_half_of_dims", "phi3", ROT0, ROT, "only half of the rotary dimensions are rotated")
def _(b):
    set_inv_freq(b, lambda o: o[: o.numel() // 2])


@fault(
    "glm4_halved_layout",
    "glm4",
    L(0, "self_attn"),
    ROT,
    "halved layout in place of the interleaved one in all layers",
    also=("norm",),
)
def _(b):
    def rotate(self, q, k, cos, sin):
        return half(q, cos[:, None], sin[:, None]), half(k, cos[:, None], sin[:, None])

    own_attention(b, rotate=rotate)


@fault("cohere2_halved_layout_layer1", "cohere2", L(1, "self_attn"), ROT, "halved layout in layer 1 only")
def _(b):
    def rotate(self, q, k, cos, sin):
        cos, sin = (torch.cat((x[..., ::2], x[..., ::2]), -1)[:, None] for x in (cos, sin))
        return half(q, cos, sin), half(k, cos, sin)

    swap(b.model.layers[1].self_attn, OwnAttn, rotate=rotate)


@fault(
    "starcoder2_keys_position_plus_one",
    "starcoder2",
    L(2, "self_attn"),
    ROT,
    "keys are rotated by position + 1, queries by position (layer 2)",
    also=("attn",),
)
def _(b):
    inv = b.model.rotary_emb.inv_freq

    def rotate(self, q, k, cos, sin):
        i = inv.to(cos.dtype)
        d = torch.cat((i, i))
        c1, s1 = d.cos(), d.sin()
        cos, sin = cos[:, None], sin[:, None]
        return half(q, cos, sin), half(k, cos * c1 - sin * s1, sin * c1 + cos * s1)

    swap(b.model.layers[2].self_attn, OwnAttn, rotate=rotate)


@fault("olmo2_positions_wrap_64", "olmo2", ROT0, ROT, "positions modulo 64: rotary tables restart after 64 tokens")
def _(b):
    base = base_forward(b.model.rotary_emb)
    swap(b.model.rotary_emb, forward=lambda self, x, position_ids: base(self, x, position_ids % 64))


@fault(
    "exaone4_rope_in_nope_layer",
    "exaone4",
    L(3, "self_attn"),
    ROT,
    "the full-attention layer 3, which has no rotary, gets rotated",
    also=("norm",),
)
def _(b):
    swap(b.model.layers[3].self_attn, OwnAttn, rotates=lambda self: True)


@fault("smollm3_rope_dropped_layer5", "smollm3", L(5, "self_attn"), ROT, "rotary left out in layer 5")
def _(b):
    b.model.layers[5].self_attn.use_rope = 0


@fault(
    "gemma3_local_theta_in_global",
    "gemma3",
    {"model.rotary_emb", L(2, "self_attn")},
    ROT,
    "global layers use the local theta",
)
def _(b):
    set_inv_freq(b, lambda o: b.model.rotary_emb.sliding_attention_inv_freq, "full_attention_inv_freq")


@fault(
    "deepseek_not_interleaved_layer2",
    "deepseek_v3",
    L(2, "self_attn"),
    ROT,
    "layer 2 takes the rotary dims as halves, not interleaved",
)
def _(b):
    a = b.model.layers[2].self_attn
    a.config = copy.deepcopy(a.config)
    a.config.rope_interleave = False


@fault(
    "gpt_neox_sin_sign_layer4",
    "gpt_neox",
    "gpt_neox.layers.4.attention",
    ROT,
    "keys of layer 4 are rotated in the opposite direction",
)
def _(b):
    import transformers.models.gpt_neox.modeling_gpt_neox as M

    a = b.gpt_neox.layers[4].attention
    base = base_forward(a)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kw):
        bsz, t, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(bsz, t, -1, 3 * self.head_size).transpose(1, 2)
        q, k, v = qkv.chunk(3, -1)
        cos, sin = (x[:, None] for x in position_embeddings)
        q, k = half(q, cos, sin), half(k, cos, -sin)
        o = Hooks()(self, q, k, v, attention_mask, self.scaling)
        return self.dense(o.transpose(1, 2).reshape(bsz, t, -1)), None

    swap(a, forward=forward)


@fault(
    "mistral_table_scale_2e-5",
    "mistral",
    ROT0,
    ROT,
    "cos and sin multiplied by 1.00002 (attention factor of a scaling rule)",
)
def _(b):
    b.model.rotary_emb.attention_scaling = 1.00002


@fault(
    "stablelm_rotates_last_dims",
    "stablelm",
    L(1, "self_attn"),
    ROT,
    "partial rotary applied to the last dims of the head",
)
def _(b):
    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kw):
        bs, t, _ = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(bs, t, -1, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        cos, sin = (x[:, None] for x in position_embeddings)
        r = self.rotary_ndims
        q, k = (torch.cat((x[..., :-r], half(x[..., -r:], cos, sin)), -1) for x in (q, k))
        o = Hooks()(self, q, k, v, attention_mask, self.scaling)
        return self.o_proj(o.transpose(1, 2).reshape(bs, t, -1)), None

    swap(b.model.layers[1].self_attn, forward=forward)


@fault(
    "hunyuan_alpha_ignored",
    "hunyuan_v1_dense",
    ROT0,
    ROT,
    "the scaling rule's alpha is ignored: base 10000",
    also=("norm",),
)
def _(b):
    set_inv_freq(b, lambda o: theta_freq(o, 10000.0))


@fault("vale_angles_float16_layer2", "vale", {"blocks.2.attn"}, ROT, "angles of the keys held in float16 in block 2")
def _(b):
    base = type(b.blocks[2].attn).forward

    def forward(self, x, ang, keep):
        bs, t, _ = x.shape
        q, k, v = self.wqkv(x).view(bs, t, self.h + 2 * self.kv, self.d).split([self.h, self.kv, self.kv], 2)
        q, k = self.turn(self.qn(q), ang), self.turn(self.kn(k), ang.half().to(ang.dtype))
        return self.wo(self.mix(q, k, v, keep))

    swap(b.blocks[2].attn, forward=forward)


@fault(
    "mica_rope_theta_layer3",
    "mica",
    {"layers.3.attn.rope", "layers.3.attn"},
    ROT,
    "theta 2002 instead of 2000 in layer 3",
)
def _(b):
    r = b.layers[3].attn.rope
    r.w = 2002.0 ** (-torch.arange(r.w.numel()).float() / r.w.numel())


# ============================================================================================================= norms


@fault(
    "qwen2_eps_1e-4_one_norm",
    "qwen2",
    L(2, "input_layernorm"),
    NORM,
    "epsilon 1e-4 instead of 1e-6 in one norm",
    also=("attn",),
)
def _(b):
    b.model.layers[2].input_layernorm.variance_epsilon = 1e-4


@fault("smollm3_eps_all_norms", "smollm3", L(0, "input_layernorm"), NORM, "epsilon 1e-5 instead of 1e-6 in all norms")
def _(b):
    for m in b.modules():
        if hasattr(m, "variance_epsilon"):
            m.variance_epsilon = 1e-5


@fault(
    "gemma3_weight_without_one",
    "gemma3",
    L(2, "post_feedforward_layernorm"),
    NORM,
    "weight used as it is, not 1 + weight, in one norm",
    also=("norm",),
)
def _(b):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    swap(b.model.layers[2].post_feedforward_layernorm, forward=forward)


@fault("cohere2_mean_kept", "cohere2", L(0, "input_layernorm"), NORM, "mean not subtracted in layer 0's norm")
def _(b):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    swap(b.model.layers[0].input_layernorm, forward=forward)


@fault(
    "nemotron_plus_one_left_out",
    "nemotron",
    L(3, "post_attention_layernorm"),
    NORM,
    "1 + weight left as weight in one norm",
)
def _(b):
    m = b.model.layers[3].post_attention_layernorm
    swap(m, forward=lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps))


@fault(
    "olmo2_q_norm_per_head",
    "olmo2",
    {L(1, "self_attn.q_norm"), L(1, "self_attn")},
    NORM,
    "q norm's mean square per head, not over all heads, in layer 1",
    also=("attn",),
)
def _(b):
    def forward(self, x):
        y = x.unflatten(-1, (4, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)
        return self.weight * y

    swap(b.model.layers[1].self_attn.q_norm, forward=forward)


@fault(
    "qwen3_k_norm_left_out", "qwen3", {L(4, "self_attn.k_norm"), L(4, "self_attn")}, NORM, "k norm left out in layer 4"
)
def _(b):
    b.model.layers[4].self_attn.k_norm = nn.Identity()


@fault(
    "hunyuan_norm_before_rotary",
    "hunyuan_v1_dense",
    {L(2, "self_attn"), L(2, "self_attn.query_layernorm"), L(2, "self_attn.key_layernorm")},
    {NORM, ROT},
    "q/k norm applied before instead of after the rotary in layer 2",
)
def _(b):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kw):
        bs, t, _ = hidden_states.shape
        q, k, v = (x.transpose(1, 2) for x in self.qkv(hidden_states))
        q, k = self.rotate(self.query_layernorm(q), self.key_layernorm(k), *position_embeddings)
        o = self.hooks(self, q, k, v, attention_mask, self.scaling)
        return self.o_proj(o.transpose(1, 2).reshape(bs, t, -1)), None

    swap(b.model.layers[2].self_attn, OwnAttn, forward=forward)


@fault("stablelm_norm_bias_dropped", "stablelm", L(2, "input_layernorm"), NORM, "bias of one layer norm dropped")
def _(b):
    b.model.layers[2].input_layernorm.bias = None


@fault(
    "starcoder2_unbiased_variance",
    "starcoder2",
    L(1, "post_attention_layernorm"),
    NORM,
    "variance with n - 1 in one layer norm",
    also=("eager",),
)
def _(b):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias

    swap(b.model.layers[1].post_attention_layernorm, forward=forward)


@fault(
    "glm4_post_mlp_norm_missing",
    "glm4",
    {L(3, "post_mlp_layernorm"), L(3)},
    NORM,
    "norm after the MLP missing in layer 3",
)
def _(b):
    b.model.layers[3].post_mlp_layernorm = nn.Identity()


@fault(
    "exaone4_norm_statistics_bf16",
    "exaone4",
    L(5, "post_attention_layernorm"),
    NORM,
    "mean square computed in bfloat16 in one norm",
    also=("eager",),
)
def _(b):
    def forward(self, x):
        v = x.bfloat16().pow(2).mean(-1, keepdim=True).to(x.dtype)
        return self.weight * (x * torch.rsqrt(v + self.variance_epsilon))

    swap(b.model.layers[5].post_attention_layernorm, forward=forward)


@fault(
    "deepseek_kv_a_eps",
    "deepseek_v3",
    {L(1, "self_attn.kv_a_layernorm")},
    NORM,
    "epsilon 1e-4 instead of 1e-6 in the latent norm of layer 1",
)
def _(b):
    b.model.layers[1].self_attn.kv_a_layernorm.variance_epsilon = 1e-4


@fault(
    "phi3_final_norm_eps",
    "phi3",
    "model.norm",
    NORM,
    "epsilon of the final norm 4e-4 instead of 1e-5",
    also=("attn", "norm"),
)
def _(b):
    b.model.norm.variance_epsilon = 4e-4


@fault(
    "apertus_q_k_norms_swapped",
    "apertus",
    {L(2, "self_attn.q_norm"), L(2, "self_attn.k_norm"), L(2, "self_attn")},
    NORM,
    "weights of q norm and k norm exchanged in layer 2",
)
def _(b):
    a = b.model.layers[2].self_attn
    q, k = a.q_norm.weight.clone(), a.k_norm.weight.clone()
    a.q_norm.weight.copy_(k)
    a.k_norm.weight.copy_(q)


@fault("vale_norm_weight_of_next_block", "vale", "blocks.1.rms2", NORM, "block 1's second norm holds block 2's weight")
def _(b):
    b.blocks[1].rms2.g.copy_(b.blocks[2].rms2.g)


@fault(
    "tern_eps_inside_std",
    "tern",
    "body.stack.2.ln",
    NORM,
    "1e-4 added to the standard deviation in place of 1e-5 to the variance",
)
def _(b):
    def forward(self, x):
        d = x - x.mean(-1, keepdim=True)
        return d / (d.square().mean(-1, keepdim=True).sqrt() + 1e-4) * self.weight + self.bias

    swap(b.body.stack[2].ln, forward=forward)


@fault(
    "mica_post_attn_norm_skipped",
    "mica",
    {"layers.2.post_attn", "layers.2"},
    NORM,
    "norm after the attention missing in layer 2",
)
def _(b):
    def forward(self, x, pos, mask):
        x = x + self.attn(self.pre_attn(x), pos, mask)
        return x + self.post_moe(self.moe(self.pre_moe(x)))

    swap(b.layers[2], forward=forward)


# ========================================================================================================= attention


@fault(
    "gemma3_scale_of_head_dim",
    "gemma3",
    L(0, "self_attn"),
    ATT,
    "scores scaled by the head dimension instead of query_pre_attn_scalar in all layers",
)
def _(b):
    for l in b.model.layers:
        l.self_attn.scaling = l.self_attn.head_dim**-0.5


@fault(
    "granite_attention_multiplier",
    "granite",
    L(4, "self_attn"),
    ATT,
    "attention multiplier replaced by 1/sqrt(head dim) in layer 4",
    also=("eager", "norm"),
)
def _(b):
    b.model.layers[4].self_attn.scaling = b.model.layers[4].self_attn.head_dim ** -0.5


@fault(
    "gemma2_attention_cap_left_out",
    "gemma2",
    L(1, "self_attn"),
    {CAP, ATT},
    "soft cap of the scores left out in layer 1",
)
def _(b):
    b.model.layers[1].self_attn.attn_logit_softcapping = None


@fault(
    "gemma2_attention_cap_10.01",
    "gemma2",
    L(2, "self_attn"),
    {CAP, ATT},
    "soft cap 10.01 instead of 10 in layer 2",
    also=("norm",),
)
def _(b):
    b.model.layers[2].self_attn.attn_logit_softcapping = 10.01


@fault(
    "gemma3_window_plus_one", "gemma3", {L(0, "self_attn"), "model"}, ATT, "sliding window 17 instead of 16 in the mask"
)
def _(b):
    b.config.sliding_window = 17


class WindowHooks(Hooks):
    def __init__(self, w):
        self.w = w

    def mask(self, s, m):
        t = s.shape[-1]
        i = torch.arange(t)
        d = i[:, None] - i[None, :]
        return s.masked_fill(~((d >= 0) & (d < self.w)), float("-inf"))


@fault(
    "mistral_window_minus_one_layer2", "mistral", L(2, "self_attn"), ATT, "sliding window 17 instead of 18 in layer 2"
)
def _(b):
    use_attention(b, register("user_window17", WindowHooks(17)), layer=2)


@fault(
    "exaone4_window_ignored_layer4", "exaone4", L(4, "self_attn"), ATT, "sliding layer 4 sees the whole past", also=()
)
def _(b):
    use_attention(b, register("user_window_none", WindowHooks(10**6)), layer=4)


class PeekHooks(Hooks):
    def mask(self, s, m):
        t = s.shape[-1]
        keep = torch.ones(t, t, dtype=torch.bool).tril(1)
        return s.masked_fill(~keep, float("-inf"))


@fault("qwen2_causal_off_by_one", "qwen2", L(3, "self_attn"), ATT, "layer 3 sees one token of the future")
def _(b):
    use_attention(b, register("user_peek", PeekHooks()), layer=3)


class BlindHooks(Hooks):
    def mask(self, s, m):
        t = s.shape[-1]
        keep = torch.ones(t, t, dtype=torch.bool).tril(-1)
        keep[0, 0] = True
        return s.masked_fill(~keep, float("-inf"))


@fault(
    "ernie_diagonal_masked", "ernie4_5_moe", L(2, "self_attn"), ATT, "layer 2's tokens do not see themselves", also=()
)
def _(b):
    use_attention(b, register("user_blind", BlindHooks()), layer=2)


class NoSinks(Hooks):
    def probs(self, s, sinks):
        return s.softmax(-1)


@fault("gpt_oss_sinks_left_out", "gpt_oss", L(2, "self_attn"), ATT, "sinks left out of the softmax in layer 2")
def _(b):
    use_attention(b, register("user_nosink", NoSinks()), layer=2)


@fault("gpt_oss_sinks_rolled", "gpt_oss", L(1, "self_attn"), ATT, "the sinks of layer 1 are assigned to the next heads")
def _(b):
    b.model.layers[1].self_attn.sinks.copy_(b.model.layers[1].self_attn.sinks.roll(1))


class RepeatHooks(Hooks):
    def expand(self, x, n):
        return x.repeat(1, n, 1, 1)


@fault(
    "mixtral_kv_tiled",
    "mixtral",
    L(1, "self_attn"),
    ATT,
    "keys and values tiled over the heads instead of repeated in place in layer 1",
)
def _(b):
    use_attention(b, register("user_tile", RepeatHooks()), layer=1)


class ValueTile(Hooks):
    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        n = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n, 1), v.repeat(1, n, 1, 1)
        return self.probs(self.mask(self.scores(q, k, scaling, softcap), mask), sinks) @ v


@fault(
    "starcoder2_values_tiled",
    "starcoder2",
    L(0, "self_attn"),
    ATT,
    "values (not keys) are given to the wrong groups in layer 0",
    also=("norm",),
)
def _(b):
    use_attention(b, register("user_value_tile", ValueTile()), layer=0)


class SwapHeads(Hooks):
    def combine(self, p, v):
        o = p @ v
        return o[:, [1, 0, *range(2, o.shape[1])]]


@fault(
    "qwen3_two_heads_exchanged",
    "qwen3",
    {L(4, "self_attn"), L(4, "self_attn.o_proj")},
    {ATT, LIN},
    "outputs of the first two heads exchanged before the output projection in layer 4",
)
def _(b):
    use_attention(b, register("user_swap_heads", SwapHeads()), layer=4)


class HalfSoftmax(Hooks):
    def __init__(self, dt):
        self.dt = dt

    def probs(self, s, sinks):
        return s.to(self.dt).softmax(-1).to(s.dtype)


@fault("starcoder2_softmax_bf16", "starcoder2", L(1, "self_attn"), ATT, "softmax in bfloat16 in layer 1")
def _(b):
    use_attention(b, register("user_softmax_bf16", HalfSoftmax(torch.bfloat16)), layer=1)


@fault("smollm3_softmax_fp16", "smollm3", L(6, "self_attn"), ATT, "softmax in float16 in layer 6")
def _(b):
    use_attention(b, register("user_softmax_fp16", HalfSoftmax(torch.float16)), layer=6)


class ProbsHalf(Hooks):
    def combine(self, p, v):
        return p.half().to(v.dtype) @ v


@fault(
    "olmo2_probabilities_fp16",
    "olmo2",
    L(3, "self_attn"),
    ATT,
    "probabilities rounded to float16 before the product with the values in layer 3",
)
def _(b):
    use_attention(b, register("user_probs_fp16", ProbsHalf()), layer=3)


@fault(
    "bloom_alibi_slopes_geometric",
    "bloom",
    {"transformer", "transformer.h.0.self_attention"},
    {ATT, ROT},
    "alibi slopes 2^(-8i/n) though n is no power of two",
)
def _(b):
    def build_alibi_tensor(self, mask, n, dtype):
        slopes = 2.0 ** (-8.0 * torch.arange(1, n + 1).to(dtype) / n)
        pos = ((mask.cumsum(-1) - 1) * mask)[:, None, :].to(dtype)
        return (slopes[..., None] * pos).reshape(mask.shape[0] * n, 1, -1).to(dtype)

    swap(b.transformer, build_alibi_tensor=build_alibi_tensor)


@fault(
    "bloom_alibi_slopes_1.0001",
    "bloom",
    {"transformer", "transformer.h.0.self_attention"},
    {ATT, ROT},
    "alibi slopes multiplied by 1.0001",
)
def _(b):
    base = type(b.transformer).build_alibi_tensor
    swap(b.transformer, build_alibi_tensor=lambda self, m, n, dtype: base(self, m, n, dtype) * 1.0001)


@fault(
    "tern_relative_bias_clamped",
    "tern",
    "body.stack.1.mix",
    ATT,
    "relative bias looked up with the distance clamped one too early",
)
def _(b):
    def bias(self, t, dev):
        i = torch.arange(t)
        return self.rel[:, (i[:, None] - i[None]).clamp(0, self.n_bias - 2)]

    swap(b.body.stack[1].mix, bias=bias)


@fault("tern_attention_bias_left_out", "tern", "body.stack.3.mix", ATT, "relative bias left out in layer 3")
def _(b):
    swap(b.body.stack[3].mix, bias=lambda self, t, dev: torch.zeros((), dtype=self.rel.dtype))


@fault(
    "deepseek_scale_of_nope_dim",
    "deepseek_v3",
    L(0, "self_attn"),
    ATT,
    "scores scaled by the non-rotary head dim only, in all layers",
    also=("attn",),
)
def _(b):
    for l in b.model.layers:
        l.self_attn.scaling = l.self_attn.qk_nope_head_dim**-0.5


class LeakHooks(Hooks):
    def mask(self, s, m):
        t = s.shape[-1]
        keep = torch.ones(t, t, dtype=torch.bool).tril()
        return torch.where(keep, s, s - 12.0)


@fault(
    "apertus_mask_minus_12",
    "apertus",
    L(1, "self_attn"),
    ATT,
    "future masked by -12 instead of minus infinity in layer 1",
)
def _(b):
    use_attention(b, register("user_leak", LeakHooks()), layer=1)


class EpsSoftmax(Hooks):
    def probs(self, s, sinks):
        e = (s - s.amax(-1, keepdim=True)).exp()
        return e / (e.sum(-1, keepdim=True) + 1e-4)


@fault(
    "apertus_softmax_plus_eps",
    "apertus",
    L(3, "self_attn"),
    ATT,
    "1e-4 added to the softmax's denominator in layer 3",
    also=("norm",),
)
def _(b):
    use_attention(b, register("user_eps_softmax", EpsSoftmax()), layer=3)


@fault(
    "nemotron_scale_bf16",
    "nemotron",
    L(0, "self_attn"),
    ATT,
    "scale of the scores rounded to bfloat16 in all layers",
    also=("attn",),
)
def _(b):
    for l in b.model.layers:
        l.self_attn.scaling = float(torch.tensor(l.self_attn.scaling).bfloat16())


@fault(
    "qwen3_scale_float16",
    "qwen3",
    L(2, "self_attn"),
    ATT,
    "scale of the scores rounded to float16 in layer 2",
    also=("norm",),
)
def _(b):
    a = b.model.layers[2].self_attn
    a.scaling = float(torch.tensor(a.scaling).half())


class ChunkHooks(Hooks):
    """Softmax over key chunks of 32 whose maxima are not corrected for one another."""

    def probs(self, s, sinks):
        e = torch.cat([(c - c.amax(-1, keepdim=True).clamp(min=-1e4)).exp() for c in s.split(32, -1)], -1)
        e = e.masked_fill(s < -1e30, 0.0)
        return e / e.sum(-1, keepdim=True)


@fault(
    "stablelm_chunks_not_rescaled",
    "stablelm",
    L(3, "self_attn"),
    ATT,
    "attention in chunks of 32 keys without correcting the maxima in layer 3",
)
def _(b):
    use_attention(b, register("user_bad_chunks", ChunkHooks()), layer=3)


@fault(
    "gpt_neox_qkv_split_whole",
    "gpt_neox",
    {"gpt_neox.layers.1.attention", "gpt_neox.layers.1.attention.query_key_value"},
    {LIN, ATT},
    "fused qkv split into thirds instead of per head in layer 1",
)
def _(b):
    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kw):
        bs, t, _ = hidden_states.shape
        q, k, v = (
            x.view(bs, t, -1, self.head_size).transpose(1, 2) for x in self.query_key_value(hidden_states).chunk(3, -1)
        )
        cos, sin = (x[:, None] for x in position_embeddings)
        o = Hooks()(self, half(q, cos, sin), half(k, cos, sin), v, attention_mask, self.scaling)
        return self.dense(o.transpose(1, 2).reshape(bs, t, -1)), None

    swap(b.gpt_neox.layers[1].attention, forward=forward)


@fault("mica_window_less_equal", "mica", "layers.2.attn", ATT, "window taken as <= instead of < in layer 2")
def _(b):
    b.layers[2].attn.window += 1


@fault(
    "mica_sink_added_after_max",
    "mica",
    "layers.1.attn",
    ATT,
    "sink's exponential not shifted by the maximum in layer 1",
)
def _(b):
    def weights(self, s):
        m = torch.maximum(s.amax(-1, keepdim=True), self.sink[None, :, None, None])
        e = (s - m).exp()
        return e / (e.sum(-1, keepdim=True) + self.sink[None, :, None, None].exp())

    swap(b.layers[1].attn, weights=weights)


# =============================================================================================================== MLP


@fault(
    "starcoder2_gelu_erf",
    "starcoder2",
    {L(0, "mlp.act"), L(0, "mlp")},
    ACT,
    "gelu by erf instead of tanh in all layers",
    also=("norm",),
)
def _(b):
    for l in b.model.layers:
        l.mlp.act = nn.GELU()


@fault(
    "gemma3_gelu_erf_layer3", "gemma3", {L(3, "mlp.act_fn"), L(3, "mlp")}, ACT, "gelu by erf instead of tanh in layer 3"
)
def _(b):
    b.model.layers[3].mlp.act_fn = nn.GELU()


@fault(
    "gpt_neox_gelu_quick",
    "gpt_neox",
    {"gpt_neox.layers.3.mlp.act", "gpt_neox.layers.3.mlp"},
    ACT,
    "quick gelu instead of gelu in layer 3",
)
def _(b):
    swap(b.gpt_neox.layers[3].mlp.act, forward=lambda self, x: x * torch.sigmoid(1.702 * x))


@fault(
    "qwen2_silu_to_gelu",
    "qwen2",
    {L(2, "mlp.act_fn"), L(2, "mlp")},
    ACT,
    "gelu instead of silu in layer 2",
    also=("attn", "norm"),
)
def _(b):
    b.model.layers[2].mlp.act_fn = nn.GELU()


@fault(
    "glm4_gate_up_swapped",
    "glm4",
    {L(1, "mlp"), L(1, "mlp.gate_up_proj"), L(1, "mlp.activation_fn")},
    {GU, ACT, LIN},
    "gate and up halves exchanged in layer 1",
)
def _(b):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))

    swap(b.model.layers[1].mlp, forward=forward)


@fault(
    "phi3_gate_up_interleaved",
    "phi3",
    {L(3, "mlp"), L(3, "mlp.gate_up_proj"), L(3, "mlp.activation_fn")},
    {GU, ACT, LIN},
    "gate and up taken as even and odd columns in layer 3",
    also=("attn",),
)
def _(b):
    def forward(self, x):
        y = self.gate_up_proj(x)
        return self.down_proj(y[..., 1::2] * self.activation_fn(y[..., ::2]))

    swap(b.model.layers[3].mlp, forward=forward)


@fault(
    "gpt_oss_clamp_left_out",
    "gpt_oss",
    {L(0, "mlp.experts"), L(0, "mlp")},
    {EXP, ACT, GU},
    "clamp of the gated unit left out in all layers",
)
def _(b):
    for l in b.model.layers:
        l.mlp.experts.limit = 1e9


@fault(
    "gpt_oss_alpha_1.7",
    "gpt_oss",
    {L(2, "mlp.experts"), L(2, "mlp")},
    {EXP, ACT},
    "alpha 1.7 instead of 1.702 in layer 2",
    also=("norm",),
)
def _(b):
    b.model.layers[2].mlp.experts.alpha = 1.7


@fault(
    "starcoder2_fc_bias_dropped",
    "starcoder2",
    L(2, "mlp.c_fc"),
    LIN,
    "bias of the first MLP projection dropped in layer 2",
    also=("eager",),
)
def _(b):
    b.model.layers[2].mlp.c_fc.bias = None


@fault(
    "apertus_xielu_beta",
    "apertus",
    {L(2, "mlp.act_fn"), L(2, "mlp")},
    ACT,
    "xIELU's beta 0.5 left out of alpha_n in layer 2",
)
def _(b):
    def forward(self, x):
        ap, an = F.softplus(self.alpha_p), F.softplus(self.alpha_n)
        return torch.where(
            x > 0, ap * x * x + self.beta * x, (torch.expm1(torch.min(x, self.eps)) - x) * an + self.beta * x
        )

    swap(b.model.layers[2].mlp.act_fn, forward=forward)


@fault(
    "apertus_xielu_alpha_bf16",
    "apertus",
    {L(4, "mlp.act_fn"), L(4, "mlp")},
    ACT,
    "xIELU's parameters in bfloat16 in layer 4",
)
def _(b):
    m = b.model.layers[4].mlp.act_fn
    m.alpha_p.copy_(m.alpha_p.bfloat16())
    m.alpha_n.copy_(m.alpha_n.bfloat16())


@fault(
    "nemotron_relu_not_squared",
    "nemotron",
    {L(4, "mlp.act_fn"), L(4, "mlp")},
    ACT,
    "relu instead of its square in layer 4",
)
def _(b):
    b.model.layers[4].mlp.act_fn = nn.ReLU()


@fault(
    "starcoder2_gelu_constant",
    "starcoder2",
    {L(3, "mlp.act"), L(3, "mlp")},
    ACT,
    "0.0446 instead of 0.044715 in the tanh gelu of layer 3",
)
def _(b):
    swap(
        b.model.layers[3].mlp.act,
        forward=lambda self, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.0446 * x**3))),
    )


@fault(
    "smollm3_sigmoid_fp16",
    "smollm3",
    {L(3, "mlp.act_fn"), L(3, "mlp")},
    ACT,
    "silu's sigmoid in float16 in layer 3",
    also=("norm_div",),
)
def _(b):
    swap(b.model.layers[3].mlp.act_fn, forward=lambda self, x: x * x.half().sigmoid().to(x.dtype))


@fault(
    "vale_silu_on_the_wrong_half",
    "vale",
    {"blocks.3.ff", "blocks.3.ff.w13"},
    {GU, ACT, LIN},
    "silu applied to the other half in block 3",
)
def _(b):
    def forward(self, x):
        p, q = self.w13(x).chunk(2, -1)
        return self.w2(p * F.silu(q))

    swap(b.blocks[3].ff, forward=forward)


@fault("tern_relu2_threshold", "tern", "body.stack.2.inner", ACT, "activation with a threshold of 1e-4 in layer 2")
def _(b):
    swap(b.body.stack[2].inner, act=lambda self, x: F.relu(x - 1e-4).square())


# ========================================================================================================== residual


def prenorm_layer(
    attn_mult=lambda self, x: x, mlp_mult=lambda self, x: x, ln=("input_layernorm", "post_attention_layernorm")
):
    def forward(self, hidden_states, **kw):
        a, _ = self.self_attn(getattr(self, ln[0])(hidden_states), **kw)
        h = hidden_states + attn_mult(self, a)
        return h + mlp_mult(self, self.mlp(getattr(self, ln[1])(h)))

    return forward


@fault(
    "granite_residual_multiplier_left_out",
    "granite",
    L(2),
    RES,
    "residual multiplier left out after the attention in layer 2",
)
def _(b):
    swap(b.model.layers[2], forward=prenorm_layer(mlp_mult=lambda self, x: x * self.residual_multiplier))


@fault(
    "granite_residual_multiplied_twice",
    "granite",
    L(3),
    RES,
    "residual multiplier applied twice to the MLP branch in layer 3",
    also=("attn", "norm"),
)
def _(b):
    swap(
        b.model.layers[3],
        forward=prenorm_layer(lambda s, x: x * s.residual_multiplier, lambda s, x: x * s.residual_multiplier**2),
    )


@fault(
    "gpt_neox_sequential_block",
    "gpt_neox",
    {"gpt_neox.layers.2", "gpt_neox.layers.2.post_attention_layernorm"},
    {RES, NORM},
    "sequential instead of parallel block in layer 2",
)
def _(b):
    b.gpt_neox.layers[2].use_parallel_residual = False


@fault(
    "stablelm_parallel_block",
    "stablelm",
    {L(4), L(4, "post_attention_layernorm")},
    {RES, NORM},
    "parallel instead of sequential block in layer 4",
    also=("attn",),
)
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.self_attn(self.input_layernorm(hidden_states), **kw)
        return hidden_states + a + self.mlp(self.post_attention_layernorm(hidden_states))

    swap(b.model.layers[4], forward=forward)


@fault(
    "cohere2_sequential_block",
    "cohere2",
    {L(2), L(2, "input_layernorm"), L(2, "mlp"), L(2, "mlp.gate_proj"), L(2, "mlp.up_proj")},
    {RES, NORM, LIN},
    "the MLP of layer 2 sees the attention's result",
)
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.self_attn(self.input_layernorm(hidden_states), **kw)
        h = hidden_states + a
        return h + self.mlp(self.input_layernorm(h))

    swap(b.model.layers[2], forward=forward)


@fault(
    "vale_residual_from_normed", "vale", "blocks.1", RES, "attention's residual taken from the normed input in block 1"
)
def _(b):
    def forward(self, x, ang, keep):
        y = self.rms1(x)
        x = y + self.attn(y, ang, keep)
        return x + self.ff(self.rms2(x))

    swap(b.blocks[1], forward=forward)


@fault("mistral_stream_fp16", "mistral", L(1), RES, "residual stream rounded to float16 after layer 1")
def _(b):
    base = base_forward(b.model.layers[1])

    def forward(self, hidden_states, **kw):
        y = base(self, hidden_states, **kw)
        return y.half().to(y.dtype)

    swap(b.model.layers[1], forward=forward)


@fault(
    "bloom_post_layernorm_residual",
    "bloom",
    {"transformer.h.1", "transformer.h.1.self_attention"},
    RES,
    "residual connection from the normed input in block 1",
)
def _(b):
    b.transformer.h[1].apply_residual_connection_post_layernorm = True


@fault("tern_gamma_exchanged", "tern", "body.stack.1", RES, "the two branch scales of layer 1 are exchanged")
def _(b):
    b.body.stack[1].gamma.copy_(b.body.stack[1].gamma.flip(0))


@fault(
    "qwen2_moe_residual_scaled_1e-4",
    "qwen2_moe",
    L(1),
    RES,
    "MLP branch multiplied by 1.0001 in layer 1",
    also=("attn",),
)
def _(b):
    swap(b.model.layers[1], forward=prenorm_layer(mlp_mult=lambda self, x: x * 1.0001))


# =========================================================================================================== mixture


def router(i, name="gate"):
    return {L(i, "mlp", name), L(i, "mlp")}


@fault("mixtral_no_renormalisation", "mixtral", router(1), ROUTER, "top-k weights not renormalised in layer 1")
def _(b):
    def forward(self, h):
        lg = F.linear(h.reshape(-1, h.shape[-1]), self.weight)
        w, i = lg.softmax(-1).topk(self.top_k, -1)
        return lg, w, i

    swap(b.model.layers[1].mlp.gate, forward=forward)


@fault(
    "mixtral_top3",
    "mixtral",
    router(2),
    ROUTER,
    "three experts per token instead of two in layer 2",
    also=("attn", "norm"),
)
def _(b):
    b.model.layers[2].mlp.gate.top_k = 3


@fault("mixtral_scores_bf16", "mixtral", router(3), ROUTER, "router weights rounded to bfloat16 in layer 3")
def _(b):
    base = base_forward(b.model.layers[3].mlp.gate)

    def forward(self, h):
        lg, w, i = base(self, h)
        return lg, w.bfloat16().to(h.dtype), i

    swap(b.model.layers[3].mlp.gate, forward=forward)


@fault("mixtral_scores_fp16", "mixtral", router(1), ROUTER, "router weights rounded to float16 in layer 1")
def _(b):
    base = base_forward(b.model.layers[1].mlp.gate)

    def forward(self, h):
        lg, w, i = base(self, h)
        return lg, w.half().to(h.dtype), i

    swap(b.model.layers[1].mlp.gate, forward=forward)


@fault(
    "mixtral_capacity",
    "mixtral",
    {L(2, "mlp.experts"), L(2, "mlp")},
    {EXP, ROUTER},
    "tokens beyond an expert's capacity of 16 are dropped in layer 2",
)
def _(b):
    base = base_forward(b.model.layers[2].mlp.experts)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        w = top_k_weights.clone()
        for e in range(self.num_experts):
            hit = top_k_index == e
            rank = hit.flatten().cumsum(0).view_as(hit)
            w[hit & (rank > 16)] = 0
        return base(self, hidden_states, top_k_index, w)

    swap(b.model.layers[2].mlp.experts, forward=forward)


@fault(
    "qwen2_moe_renormalised",
    "qwen2_moe",
    router(0),
    ROUTER,
    "top-k weights renormalised though the configuration says no, all layers",
)
def _(b):
    for l in b.model.layers:
        l.mlp.gate.norm_topk_prob = True


@fault(
    "qwen2_moe_shared_gate_left_out",
    "qwen2_moe",
    {L(2, "mlp.shared_expert_gate"), L(2, "mlp")},
    {EXP, ACT, GU, LIN, ROUTER},
    "gate of the shared expert left out in layer 2",
)
def _(b):
    def forward(self, x):
        h = x.reshape(-1, x.shape[-1])
        _, w, i = self.gate(h)
        return (self.experts(h, i, w) + self.shared_expert(h)).view_as(x)

    swap(b.model.layers[2].mlp, forward=forward)


@fault(
    "qwen2_moe_shared_gate_hard_sigmoid",
    "qwen2_moe",
    {L(3, "mlp"), L(3, "mlp.shared_expert_gate")},
    {EXP, ACT, GU},
    "shared expert's gate by a hard sigmoid in layer 3",
)
def _(b):
    def forward(self, x):
        h = x.reshape(-1, x.shape[-1])
        _, w, i = self.gate(h)
        return (self.experts(h, i, w) + F.hardsigmoid(self.shared_expert_gate(h)) * self.shared_expert(h)).view_as(x)

    swap(b.model.layers[3].mlp, forward=forward)


def ds_router(b, i, **opt):
    m = b.model.layers[i].mlp.gate

    def forward(self, h):
        h = h.reshape(-1, h.shape[-1])
        lg = F.linear(h, self.weight)
        s = lg.softmax(-1) if opt.get("softmax") else lg.sigmoid()
        c = s if opt.get("no_bias") else s + self.e_score_correction_bias
        g = c.unflatten(-1, (self.num_group, -1))
        gs = g.amax(-1) if opt.get("group_max") else g.topk(2, -1)[0].sum(-1)
        gi = gs.topk(self.topk_group, -1)[1]
        if not opt.get("no_groups"):
            keep = torch.zeros_like(gs, dtype=torch.bool).scatter(1, gi, True)
            c = g.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
        i = c.topk(self.top_k, -1)[1]
        w = (s + self.e_score_correction_bias if opt.get("biased_weights") else s).gather(1, i)
        w = w / w.sum(-1, keepdim=True)
        return lg, w * opt.get("scale", self.routed_scaling_factor), i

    swap(m, forward=forward)


for _name, _i, _opt, _why, _also in [
    ("deepseek_no_correction_bias", 2, dict(no_bias=True), "correction bias left out of the choice in layer 2", ()),
    (
        "deepseek_bias_in_weights",
        1,
        dict(biased_weights=True),
        "correction bias counted in the weights too in layer 1",
        ("attn", "norm"),
    ),
    ("deepseek_softmax_router", 3, dict(softmax=True), "softmax instead of sigmoid in layer 3's router", ()),
    ("deepseek_groups_ignored", 1, dict(no_groups=True), "groups of experts ignored in layer 1", ("mlp",)),
    (
        "deepseek_group_score_max",
        2,
        dict(group_max=True),
        "groups scored by their best expert instead of their best two in layer 2",
        (),
    ),
    ("deepseek_scaling_left_out", 3, dict(scale=1.0), "routed scaling factor left out in layer 3", ("attn",)),
    ("deepseek_scaling_1.7001", 2, dict(scale=1.7001), "routed scaling factor 1.7001 instead of 1.7 in layer 2", ()),
]:
    fault(_name, "deepseek_v3", router(_i), ROUTER, _why, also=_also)(lambda b, i=_i, o=_opt: ds_router(b, i, **o))


@fault(
    "deepseek_shared_expert_doubled",
    "deepseek_v3",
    {L(2, "mlp"), L(2, "mlp.shared_experts")},
    {EXP, RES, GU},
    "shared expert added twice in layer 2",
)
def _(b):
    base = base_forward(b.model.layers[2].mlp)
    swap(b.model.layers[2].mlp, forward=lambda self, x: base(self, x) + self.shared_experts(x))


@fault(
    "ernie_experts_permuted",
    "ernie4_5_moe",
    {L(3, "mlp.experts"), L(3, "mlp")},
    EXP,
    "experts of layer 3 stored in another order",
)
def _(b):
    e = b.model.layers[3].mlp.experts
    p = torch.tensor([0, 1, 4, 3, 2, 5])
    e.gate_up_proj.copy_(e.gate_up_proj[p])
    e.down_proj.copy_(e.down_proj[p])


@fault(
    "ernie_correction_bias_left_out",
    "ernie4_5_moe",
    {*router(2), L(2, "mlp.gate.moe_statics")},
    ROUTER,
    "correction bias left out in layer 2",
    also=("attn", "norm"),
)
def _(b):
    b.model.layers[2].mlp.gate.moe_statics.e_score_correction_bias.zero_()


@fault(
    "ernie_expert_row_stale",
    "ernie4_5_moe",
    {L(4, "mlp.experts"), L(4, "mlp")},
    EXP,
    "one row of one expert's down projection is 0.1% larger in layer 4",
)
def _(b):
    b.model.layers[4].mlp.experts.down_proj[2, 5] *= 1.001


@fault(
    "gpt_oss_softmax_before_topk",
    "gpt_oss",
    router(1, "router"),
    ROUTER,
    "softmax over all experts instead of over the chosen in layer 1",
)
def _(b):
    def forward(self, h):
        lg = F.linear(h, self.weight, self.bias)
        w, i = lg.softmax(-1).topk(self.top_k, -1)
        return lg, w, i

    swap(b.model.layers[1].mlp.router, forward=forward)


@fault(
    "gpt_oss_router_bias_dropped",
    "gpt_oss",
    router(3, "router"),
    {ROUTER, LIN},
    "router's bias dropped in layer 3",
    also=("attn",),
)
def _(b):
    b.model.layers[3].mlp.router.bias.zero_()


@fault(
    "mixtral_weight_on_input",
    "mixtral",
    {L(0, "mlp.experts"), L(0, "mlp")},
    EXP,
    "router's weight multiplied on the experts' input instead of their output in layer 0",
    also=("norm",),
)
def _(b):
    def forward(self, x, idx, w):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, s = torch.where(idx == e)
            z = x[t] * w[t, s, None]
            g, u = F.linear(z, self.gate_up_proj[e]).chunk(2, -1)
            y.index_add_(0, t, F.linear(self.act_fn(g) * u, self.down_proj[e]))
        return y

    swap(b.model.layers[0].mlp.experts, forward=forward)


@fault(
    "mica_balance_in_weights",
    "mica",
    {"layers.1.moe.router", "layers.1.moe"},
    ROUTER,
    "balancing bias counted in the weights in layer 1",
)
def _(b):
    def forward(self, x):
        s = self.lin(x).sigmoid() + self.balance
        w, idx = s.topk(self.k, -1)
        return w / w.sum(-1, keepdim=True) * self.route_scale, idx

    swap(b.layers[1].moe.router, forward=forward)


@fault(
    "mica_common_expert_left_out",
    "mica",
    {"layers.3.moe", "layers.3.moe.common"},
    {EXP, RES, GU, ACT},
    "common expert left out in layer 3",
)
def _(b):
    base = base_forward(b.layers[3].moe)

    def forward(self, x):
        return base(self, x) - self.common(x)

    swap(b.layers[3].moe, forward=forward)


@fault(
    "mica_expert_gelu_erf",
    "mica",
    {"layers.2.moe.experts.4", "layers.2.moe", "layers.2.moe.experts"},
    {ACT, EXP},
    "gelu by erf in one expert of layer 2",
)
def _(b):
    swap(b.layers[2].moe.experts[4], forward=lambda self, x: self.down(F.gelu(self.gate(x)) * self.up(x)))


# ========================================================================================================= embedding


@fault("gemma3_embed_scale_left_out", "gemma3", "model.embed_tokens", EMB, "scale of the embedding left out")
def _(b):
    b.model.embed_tokens.embed_scale.fill_(1.0)


@fault(
    "gemma2_embed_scale_bf16",
    "gemma2",
    "model.embed_tokens",
    EMB,
    "scale of the embedding rounded to bfloat16",
    also=("norm",),
)
def _(b):
    s = b.model.embed_tokens.embed_scale
    s.copy_(s.bfloat16().float())


@fault("granite_embedding_multiplier", "granite", {"model.embed_tokens", "model"}, EMB, "embedding multiplier left out")
def _(b):
    b.model.embedding_multiplier = 1.0


@fault("tern_positions_off_by_one", "tern", {"body.places", "body"}, EMB, "learned positions start at one")
def _(b):
    base = base_forward(b.body.places)
    swap(b.body.places, forward=lambda self, pos: base(self, pos + 1))


@fault(
    "tern_positions_offset_at_padding",
    "tern",
    {"body.places", "body"},
    EMB,
    "positions counted as if 8 padding tokens stood to the left",
)
def _(b):
    base = base_forward(b)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kw):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None].expand_as(input_ids) + 8
        return base(self, input_ids, attention_mask, position_ids)

    swap(b, forward=forward)


@fault("qwen3_embedding_row_stale", "qwen3", "model.embed_tokens", EMB, "row of one token stale by 0.01%")
def _(b):
    i = int(make_inputs("qwen3")[3][40])
    b.model.embed_tokens.weight[i] *= 1.0 + 1e-4 * torch.randn(b.config.hidden_size, generator=gen(3))


@fault(
    "olmo2_padding_row_zeroed",
    "olmo2",
    "model.embed_tokens",
    EMB,
    "row of one used token (taken as padding) zero",
    also=("eager", "norm"),
)
def _(b):
    b.model.embed_tokens.weight[int(make_inputs("olmo2")[1][10])] = 0


@fault("mica_embedding_scale_sqrt", "mica", {"emb", ""}, EMB, "embedding scale 8.0005 instead of 8")
def _(b):
    b.emb_scale = 8.0005


# ============================================================================================================== head


@fault(
    "qwen2_head_untied",
    "qwen2",
    "lm_head",
    HEAD,
    "head untied: its weight is older than the embedding",
    a=lambda a: a.lm_head.weight.copy_(a.model.embed_tokens.weight),
)
def _(b):
    b.lm_head.weight.add_(1e-4 * torch.randn(b.lm_head.weight.shape, generator=gen(4)))


@fault("gemma2_final_cap_left_out", "gemma2", {"", "lm_head"}, {CAP, SCALE}, "soft cap of the logits left out")
def _(b):
    b.config.final_logit_softcapping = None


@fault("tern_cap_rounded", "tern", {"", "readout"}, CAP, "logits capped at 8.002 instead of 8")
def _(b):
    swap(b, finish=lambda self, z: 8.002 * torch.tanh(z / 8.002))


@fault(
    "cohere2_logit_scale_left_out", "cohere2", {"", "lm_head"}, {SCALE, HEAD}, "logit scale left out", also=("norm",)
)
def _(b):
    b.logit_scale = 1.0


@fault("granite_logits_scaling", "granite", {"", "lm_head"}, {SCALE, HEAD}, "logits divided by 1.6001 instead of 1.6")
def _(b):
    b.config.logits_scaling = 1.6001


@fault("mica_logit_multiplier", "mica", {"", "unemb"}, {SCALE, HEAD}, "logit multiplier left out")
def _(b):
    b.logit_mult = 1.0


@fault(
    "exaone4_padded_vocabulary_in_softmax",
    "exaone4",
    {"", "lm_head"},
    {HEAD, LSM},
    "head padded to 384 rows with zeros and not cut: the log-softmax sums over them",
    note="B's logits have 384 columns, A's 320",
)
def _(b):
    lin = nn.Linear(b.config.hidden_size, 384, bias=False)
    lin.weight.zero_()
    lin.weight[:320] = b.lm_head.weight
    b.lm_head = lin


@fault(
    "stablelm_unused_rows_of_head",
    "stablelm",
    "lm_head",
    HEAD,
    "padding rows of the vocabulary hold noise of 2e-5 in place of zeros in the head",
    a=lambda a: a.lm_head.weight[312:].zero_(),
)
def _(b):
    b.lm_head.weight[312:] = 2e-5 * torch.randn(8, b.config.hidden_size, generator=gen(5))


@fault(
    "ernie_head_row_stale", "ernie4_5_moe", "lm_head", HEAD, "one row of the head stale by 0.02%", also=("norm", "attn")
)
def _(b):
    b.lm_head.weight[77] *= 1.0002


@fault("smollm3_head_bf16", "smollm3", "lm_head", HEAD, "head's product computed in bfloat16")
def _(b):
    swap(b.lm_head, forward=lambda self, x: F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype))


@fault("tern_head_bias_dropped", "tern", "readout", HEAD, "bias of the head dropped")
def _(b):
    b.readout.bias = None


# ============================================================================================================= state


@fault(
    "qwen3_stale_down_proj",
    "qwen3",
    L(4, "mlp.down_proj"),
    LIN,
    "layer 4's down projection is one (small) training step older",
    also=("norm", "mlp"),
)
def _(b):
    w = b.model.layers[4].mlp.down_proj.weight
    w.add_(2e-4 * torch.randn(w.shape, generator=gen(6)) * w.std())


@fault(
    "mistral_mantissa_bit",
    "mistral",
    L(2, "self_attn.v_proj"),
    LIN,
    "one mantissa bit of one element flipped in layer 2",
)
def _(b):
    w = b.model.layers[2].self_attn.v_proj.weight
    j = int(w[7].abs().argmax())
    w.view(torch.int32)[7, j] ^= 1 << 17


@fault(
    "olmo2_exponent_bit",
    "olmo2",
    L(2, "mlp.up_proj"),
    LIN,
    "one exponent bit of one element flipped in layer 2",
    also=("eager",),
)
def _(b):
    b.model.layers[2].mlp.up_proj.weight.view(torch.int32)[9, 11] ^= 1 << 24


@fault(
    "gemma3_sign_bit",
    "gemma3",
    L(4, "self_attn.q_proj"),
    LIN,
    "sign bit of one element flipped in layer 4",
    also=("norm",),
)
def _(b):
    w = b.model.layers[4].self_attn.q_proj.weight
    w.view(torch.int32)[3, 3] ^= -(1 << 31)


@fault(
    "glm4_layer_bf16", "glm4", L(3, "input_layernorm"), NORM, "layer 3 was cast to bfloat16 and back (its norm first)"
)
def _(b):
    for p in b.model.layers[3].parameters():
        p.copy_(p.bfloat16())


@fault(
    "granite_o_proj_fp16",
    "granite",
    L(5, "self_attn.o_proj"),
    LIN,
    "output projection of layer 5 cast to float16 and back",
    also=("attn",),
)
def _(b):
    w = b.model.layers[5].self_attn.o_proj.weight
    w.copy_(w.half())


@fault(
    "phi3_fp8_wrong_scale",
    "phi3",
    L(1, "mlp.down_proj"),
    LIN,
    "down projection of layer 1 in fp8 with a scale taken for another range",
)
def _(b):
    w = b.model.layers[1].mlp.down_proj.weight
    s = w.abs().amax() / 448.0
    w.copy_((w / s).to(torch.float8_e4m3fn).float() * (s * 448.0 / 440.0))


@fault(
    "hunyuan_fp8_o_proj",
    "hunyuan_v1_dense",
    L(1, "self_attn.o_proj"),
    LIN,
    "output projection of layer 1 in fp8 with one scale per tensor",
    also=("eager",),
)
def _(b):
    w = b.model.layers[1].self_attn.o_proj.weight
    s = w.abs().amax() / 448.0
    w.copy_((w / s).to(torch.float8_e4m3fn).float() * s)


def lora_pair(w, seed, r=4):
    g = gen(seed)
    q = lambda *sh: (torch.randn(*sh, generator=g) * 8).round().clamp(-15, 15) / 64
    return q(r, w.shape[1]), q(w.shape[0], r)


def grid(w):  # so that merged and unmerged agree exactly in float32
    w.copy_((w * 2**14).round() / 2**14)


def merge_lora(a, skip=(), scale=0.25):
    for i, l in enumerate(a.model.layers):
        w = l.self_attn.v_proj.weight
        grid(w)
        if i not in skip:
            p, q = lora_pair(w, 50 + i)
            w.add_(scale * q @ p)


class LoRALinear(nn.Module):
    def __init__(self, base, p, q, scale):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(p.shape[1], p.shape[0], bias=False)
        self.lora_b = nn.Linear(q.shape[1], q.shape[0], bias=False)
        self.lora_a.weight.copy_(p)
        self.lora_b.weight.copy_(q)
        self.scale = scale

    def forward(self, x):
        return self.base_layer(x) + self.scale * self.lora_b(self.lora_a(x))


def unmerge_lora(b, scale=0.25, only=None, wrong=None):
    for i, l in enumerate(b.model.layers):
        v = l.self_attn.v_proj
        p, q = lora_pair(v.weight, 50 + i)
        v.weight.sub_(scale * q @ p)
        l.self_attn.v_proj = LoRALinear(v, p, q, wrong.get(i, scale) if wrong else scale)


@fault(
    "mistral_lora_not_merged_layer2",
    "mistral",
    L(2, "self_attn.v_proj"),
    LIN,
    "LoRA of v_proj not merged in layer 2",
    a=merge_lora,
)
def _(b):
    w = b.model.layers[2].self_attn.v_proj.weight
    p, q = lora_pair(w, 52)
    w.sub_(0.25 * q @ p)


@fault(
    "qwen3_lora_scale_wrong_layer3",
    "qwen3",
    {L(3, "self_attn.v_proj"), L(3, "self_attn.v_proj.lora_b"), L(3, "self_attn.v_proj.lora_a")},
    LIN,
    "unmerged LoRA with the scale of another rank in layer 3",
    a=merge_lora,
)
def _(b):
    unmerge_lora(b, wrong={3: 0.26})


@fault(
    "apertus_o_proj_transposed",
    "apertus",
    L(0, "self_attn.o_proj"),
    LIN,
    "square output projection of layer 0 transposed",
    also=("eager",),
)
def _(b):
    w = b.model.layers[0].self_attn.o_proj.weight
    w.copy_(w.t().clone())


@fault(
    "cohere2_q_rows_permuted",
    "cohere2",
    L(2, "self_attn.q_proj"),
    {LIN, ROT},
    "rows of q_proj permuted for the other rotary layout (and the keys not) in layer 2",
)
def _(b):
    w = b.model.layers[2].self_attn.q_proj.weight
    w.copy_(w.view(4, 8, 2, -1).transpose(1, 2).reshape(w.shape))


@fault(
    "qwen2_k_v_weights_exchanged",
    "qwen2",
    {L(1, "self_attn.k_proj"), L(1, "self_attn.v_proj")},
    LIN,
    "k_proj and v_proj of layer 1 loaded into each other",
    also=("norm", "mlp"),
)
def _(b):
    a = b.model.layers[1].self_attn
    a.k_proj, a.v_proj = a.v_proj, a.k_proj


@fault(
    "ernie_bias_stale",
    "ernie4_5_moe",
    L(1, "self_attn.q_proj"),
    LIN,
    "bias of q_proj stale by 1e-3 in layer 1",
    also=("norm",),
)
def _(b):
    p = b.model.layers[1].self_attn.q_proj.bias
    p.add_(1e-3 * torch.randn(p.shape, generator=gen(8)))


@fault("vale_qkv_bias_row", "vale", "blocks.4.attn.wqkv", LIN, "bias of one value row off by 2e-4 in block 4")
def _(b):
    b.blocks[4].attn.wqkv.bias[-3] += 2e-4


@fault(
    "gpt_neox_layers_exchanged",
    "gpt_neox",
    {"gpt_neox.layers.2.input_layernorm", "gpt_neox.layers.2.post_attention_layernorm", "gpt_neox.layers.2"},
    NORM,
    "layers 2 and 3 stand in the other order",
)
def _(b):
    ls = b.gpt_neox.layers
    ls[2], ls[3] = ls[3], ls[2]


@fault(
    "gpt_neox_fc_weight_quantised_int8",
    "gpt_neox",
    "gpt_neox.layers.0.mlp.dense_h_to_4h",
    LIN,
    "int8 by rows in one projection of layer 0",
    also=("attn",),
)
def _(b):
    w = b.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
    s = w.abs().amax(-1, keepdim=True) / 127
    w.copy_((w / s).round() * s)


@fault(
    "bloom_dense_bias_stale",
    "bloom",
    "transformer.h.2.self_attention.dense",
    LIN,
    "bias of the attention's output projection scaled by 1.001 in block 2",
)
def _(b):
    b.transformer.h[2].self_attention.dense.bias *= 1.001


@fault(
    "deepseek_q_b_column",
    "deepseek_v3",
    L(3, "self_attn.q_b_proj"),
    LIN,
    "one column of q_b_proj scaled by 1.002 in layer 3",
    also=("attn", "norm"),
)
def _(b):
    b.model.layers[3].self_attn.q_b_proj.weight[:, 4] *= 1.002


@fault(
    "granite_values_shifted_last_head",
    "granite",
    L(0, "self_attn"),
    ATT,
    "values shifted by one token for the last head in layer 0",
)
def _(b):
    class Shift(Hooks):
        def combine(self, p, v):
            o = p @ v
            sh = torch.cat((v[:, -1:, :1], v[:, -1:, :-1]), 2)
            o = o.clone()
            o[:, -1:] = p[:, -1:] @ sh
            return o

    use_attention(b, register("user_shift_values", Shift()), layer=0)


# ====================================================================================================== more small ones


@fault("glm4_tables_fp16_layer2", "glm4", L(2, "self_attn"), ROT, "cos and sin of layer 2 in float16", also=("attn",))
def _(b):
    with_tables(b.model.layers[2].self_attn, lambda c, s: (c.half().to(c.dtype), s.half().to(s.dtype)))


@fault("hunyuan_alpha_50.02", "hunyuan_v1_dense", ROT0, ROT, "scaling rule's alpha 50.02 instead of 50")
def _(b):
    set_inv_freq(b, lambda o: theta_freq(o, 10000.0 * 50.02 ** (16 / 14)))


@fault(
    "cohere2_eps_layer3",
    "cohere2",
    L(3, "input_layernorm"),
    NORM,
    "epsilon 3e-4 instead of 1e-5 in layer 3's norm",
    also=("attn",),
)
def _(b):
    b.model.layers[3].input_layernorm.variance_epsilon = 3e-4


@fault(
    "stablelm_one_head_norm",
    "stablelm",
    {L(1, "self_attn.k_layernorm"), L(1, "self_attn.k_layernorm.norms.1"), L(1, "self_attn")},
    NORM,
    "the norm of one key head scaled by 1.0005 in layer 1",
)
def _(b):
    b.model.layers[1].self_attn.k_layernorm.norms[1].weight *= 1.0005


@fault(
    "gemma3_query_scalar_32.01",
    "gemma3",
    L(0, "self_attn"),
    ATT,
    "query_pre_attn_scalar 32.01 instead of 32",
    also=("norm", "eager"),
)
def _(b):
    for l in b.model.layers:
        l.self_attn.scaling = 32.01**-0.5


@fault(
    "gemma3_norm_weight_fp16",
    "gemma3",
    {L(1, "self_attn.q_norm")},
    NORM,
    "1 + weight computed in float16 in one q norm",
    also=("mlp",),
)
def _(b):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight.half()).to(x.dtype)

    swap(b.model.layers[1].self_attn.q_norm, forward=forward)


@fault("vale_wo_fp16", "vale", "blocks.2.attn.wo", LIN, "output projection of block 2 cast to float16 and back")
def _(b):
    w = b.blocks[2].attn.wo.weight
    w.copy_(w.half())


@fault("mica_sink_bf16", "mica", "layers.2.attn", ATT, "sinks of layer 2 held in bfloat16")
def _(b):
    s = b.layers[2].attn.sink
    s.copy_(s.bfloat16())


@fault(
    "mica_route_scale_1.801",
    "mica",
    {"layers.0.moe.router", "layers.0.moe"},
    ROUTER,
    "route scale 1.801 instead of 1.8 in layer 0",
)
def _(b):
    b.layers[0].moe.router.route_scale = 1.801


@fault(
    "bloom_scale_fp16",
    "bloom",
    "transformer.h.0.self_attention",
    ATT,
    "scale of the scores rounded to float16 in all blocks",
)
def _(b):
    for l in b.transformer.h:
        l.self_attention.inv_norm_factor = float(torch.tensor(l.self_attention.inv_norm_factor).half())


@fault(
    "exaone4_q_norm_eps",
    "exaone4",
    {L(2, "self_attn.q_norm"), L(2, "self_attn")},
    NORM,
    "epsilon of one q norm 1e-3 instead of 1e-6",
    also=("attn",),
)
def _(b):
    b.model.layers[2].self_attn.q_norm.variance_epsilon = 1e-3


@fault("gpt_oss_sinks_bf16", "gpt_oss", L(3, "self_attn"), ATT, "sinks of layer 3 held in bfloat16", also=("norm",))
def _(b):
    s = b.model.layers[3].self_attn.sinks
    s.copy_(s.bfloat16())


@fault("tern_gamma_fp16", "tern", "body.stack.2", RES, "branch scales of layer 2 in float16")
def _(b):
    g = b.body.stack[2].gamma
    g.copy_(g.half())


@fault(
    "gpt_neox_residual_attn_0.9999",
    "gpt_neox",
    "gpt_neox.layers.1",
    RES,
    "attention branch multiplied by 0.9999 in layer 1",
    also=("norm",),
)
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.attention(self.input_layernorm(hidden_states), **kw)
        return hidden_states + 0.9999 * a + self.mlp(self.post_attention_layernorm(hidden_states))

    swap(b.gpt_neox.layers[1], forward=forward)


@fault(
    "phi3_sigmoid_fp16",
    "phi3",
    {L(2, "mlp.activation_fn"), L(2, "mlp")},
    ACT,
    "silu's sigmoid in float16 in layer 2",
    also=("attn", "norm"),
)
def _(b):
    swap(b.model.layers[2].mlp.activation_fn, forward=lambda self, x: x * x.half().sigmoid().to(x.dtype))


@fault(
    "nemotron_up_bias_bf16",
    "nemotron",
    L(1, "mlp.up_proj"),
    LIN,
    "bias of up_proj in layer 1 held in bfloat16",
    also=("norm",),
)
def _(b):
    p = b.model.layers[1].mlp.up_proj.bias
    p.copy_(p.bfloat16())


@fault(
    "qwen2_moe_weights_1.0005",
    "qwen2_moe",
    router(2),
    ROUTER,
    "router's weights multiplied by 1.0005 in layer 2",
    also=("norm",),
)
def _(b):
    base = base_forward(b.model.layers[2].mlp.gate)

    def forward(self, h):
        lg, w, i = base(self, h)
        return lg, w * 1.0005, i

    swap(b.model.layers[2].mlp.gate, forward=forward)


@fault(
    "qwen2_moe_shared_gate_bf16",
    "qwen2_moe",
    L(0, "mlp.shared_expert_gate"),
    {LIN, EXP},
    "weight of the shared expert's gate in bfloat16 in layer 0",
)
def _(b):
    w = b.model.layers[0].mlp.shared_expert_gate.weight
    w.copy_(w.bfloat16())


@fault(
    "mixtral_one_expert_fp16",
    "mixtral",
    {L(2, "mlp.experts"), L(2, "mlp")},
    EXP,
    "one expert of layer 2 cast to float16 and back",
    also=("attn",),
)
def _(b):
    e = b.model.layers[2].mlp.experts
    e.gate_up_proj[3] = e.gate_up_proj[3].half().float()
    e.down_proj[3] = e.down_proj[3].half().float()


@fault(
    "deepseek_scale_one_layer",
    "deepseek_v3",
    L(2, "self_attn"),
    ATT,
    "scale of the scores of layer 2 larger by 0.01%",
    also=("norm_div",),
)
def _(b):
    b.model.layers[2].self_attn.scaling *= 1.0001


@fault("olmo2_k_norm_weight_fp16", "olmo2", L(3, "self_attn.k_norm"), NORM, "weight of one k norm in float16")
def _(b):
    w = b.model.layers[3].self_attn.k_norm.weight
    w.copy_(w.half())


@fault(
    "smollm3_final_norm_weight_fp16",
    "smollm3",
    "model.norm",
    NORM,
    "weight of the final norm in float16",
    also=("eager", "mlp"),
)
def _(b):
    b.model.norm.weight.copy_(b.model.norm.weight.half())


@fault("gemma2_embedding_fp16", "gemma2", "model.embed_tokens", EMB, "embedding table in float16", also=("norm_div",))
def _(b):
    b.model.embed_tokens.weight.copy_(b.model.embed_tokens.weight.half())


@fault("cohere2_head_column", "cohere2", "lm_head", HEAD, "one column of the head scaled by 1.001")
def _(b):
    b.lm_head.weight[:, 5] *= 1.001
