"""Shapes: M tokens, K inputs, O outputs, H hidden width, I inner width, E experts, J experts per token, D head width, C
tokens per chunk, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .functions import Precision, cosine_and_sine, divided, exp, log, rounded, silu
from .slices import Slices, bits_for, matmul, sliced, sum_of_squares, sum_of_units

ROWS = 2048
CHUNK_BYTES = 128 << 20
"""Maximum size of the float64 logits in memory at once (bytes)."""


class Linear:
    def __init__(self, weight_OK: Any, bias_O: Any, precision: Precision, output_dtype: Any = None):
        self._precision = precision
        self._dtype = output_dtype or precision.dtype
        self._bits = bits_for(weight_OK.shape[1], precision.slices)
        self._weight: Slices = sliced(weight_OK.detach().to(torch.float64), self._bits, precision.slices)
        self._bias_O = None if bias_O is None else bias_O.detach().to(torch.float64)

    def __call__(self, x_MK: Any) -> Any:
        parts = []
        for rows_MK in x_MK.split(ROWS):
            result_MO = matmul(sliced(rows_MK, self._bits, self._precision.slices), self._weight)
            if self._bias_O is not None:
                result_MO = result_MO + self._bias_O
            parts.append(rounded(result_MO, self._dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class RmsNorm:
    """Root mean square normalisation along the last axis (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, module: Any, precision: Precision):
        self._weight = module.weight.detach().to(torch.float64)
        self._epsilon = float(module.variance_epsilon)
        self._precision = precision

    def __call__(self, x: Any) -> Any:
        mean = divided(sum_of_squares(x, self._precision.slices), x.shape[-1])
        return self._precision.round(self._precision.round(x / (mean + self._epsilon).sqrt()) * self._weight)


class Rotary:
    def __init__(self, module: Any, precision: Precision):
        self._frequencies = module.inv_freq.detach().to(torch.float64)
        self._scaling = float(module.attention_scaling)
        self._precision = precision

    def table(self, positions: Any) -> tuple[Any, Any]:
        """Return cosines and sines [..., D] for positions [...]. They are rounded to float32, as in transformers."""
        angles = rounded(positions[..., None].to(torch.float64) * self._frequencies, torch.float32)
        tables = []
        for values in cosine_and_sine(angles):
            single = rounded(rounded(values, torch.float32) * self._scaling, torch.float32)
            tables.append(self._precision.round(torch.cat((single, single), dim=-1)))
        return tables[0], tables[1]

    def turn(self, x: Any, cosine: Any, sine: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
        return self._precision.round(self._precision.round(x * cosine) + self._precision.round(across * sine))


class Mlp:
    def __init__(self, gate: Linear, up: Linear, down: Linear, precision: Precision):
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.act_fn: Callable[[Any], Any] = lambda x: precision.round(silu(x))
        self._precision = precision

    def __call__(self, x_MH: Any) -> Any:
        return self.down_proj(self._precision.round(self.act_fn(self.gate_proj(x_MH)) * self.up_proj(x_MH)))


class Router:
    """Selects the J most probable experts for each token. Ties go to the lower index."""

    def __init__(self, linear: Linear, chosen: int, normalised: bool, precision: Precision):
        """`chosen` is J, the number of experts per token. With `normalised`, a token's J weights sum to 1."""
        self._linear, self._chosen, self._normalised, self._precision = linear, chosen, normalised, precision

    def __call__(self, x_MH: Any) -> tuple[Any, Any, Any]:
        """Return logits [M, E], weights [M, J] and experts [M, J]."""
        logits_ME = self._linear(x_MH)
        odds_ME = exp(logits_ME - logits_ME.amax(dim=-1, keepdim=True))
        probabilities_ME = self._precision.wide(odds_ME / sum_of_units(odds_ME))
        sorted_ME, order_ME = probabilities_ME.sort(dim=-1, descending=True, stable=True)
        weights_MJ, experts_MJ = sorted_ME[:, : self._chosen], order_ME[:, : self._chosen]
        if self._normalised:
            total_M1 = weights_MJ[:, :1]
            for slot in range(1, self._chosen):
                total_M1 = self._precision.wide(total_M1 + weights_MJ[:, slot : slot + 1])
            weights_MJ = self._precision.wide(weights_MJ / total_M1)
        return logits_ME, self._precision.round(weights_MJ), experts_MJ


class Experts:
    def __init__(self, experts: list[Mlp], precision: Precision):
        self._experts, self._precision = experts, precision

    def __call__(self, x_MH: Any, experts_MJ: Any, weights_MJ: Any) -> Any:
        """Return each token's weighted sum of expert outputs [M, H]. Outputs are added in order of expert index."""
        result_MH = torch.zeros_like(x_MH)
        sorted_N, order_N = experts_MJ.flatten().sort(stable=True)
        tokens_N, weights_N1 = order_N // experts_MJ.shape[1], weights_MJ.flatten()[order_N, None]
        # Find where each expert's tokens end. `tolist` is the layer's only copy from the device to the host.
        numbers_E = torch.arange(len(self._experts) - 1, device=x_MH.device)
        ends = torch.searchsorted(sorted_N, numbers_E, right=True).tolist()
        parts = zip(self._experts, tokens_N.tensor_split(ends), weights_N1.tensor_split(ends), strict=True)
        for expert, token, weight in parts:
            if len(token):
                given = self._precision.round(expert(x_MH[token]) * weight)
                result_MH[token] = self._precision.round(result_MH[token] + given)
        return result_MH


class Mixture:
    def __init__(self, router: Router, experts: Experts):
        self.gate, self.experts = router, experts

    def __call__(self, x_MH: Any) -> Any:
        _, weights_MJ, experts_MJ = self.gate(x_MH)
        return self.experts(x_MH, experts_MJ, weights_MJ)


class ExactHead:
    def __init__(self, held: Any, precision: Precision, temperature: float, projection_dtype: Any = None):
        """Logits are rounded to `projection_dtype` (default: the activations' dtype)."""
        projection = held.get_output_embeddings()
        self._linear = Linear(projection.weight, projection.bias, precision, projection_dtype)
        self._chunk = max(1, CHUNK_BYTES // (8 * projection.weight.shape[0]))
        self._precision, self._temperature = precision, temperature

    def logprobs(self, hidden_MH: Any, ids_M: Any) -> Any:
        """Return the log-probabilities [M] of `ids_M` in nats, as float32 (float64 for a float64 model)."""
        parts = [hidden_MH.new_zeros(0)]
        for hidden_CH, ids_C in zip(hidden_MH.split(self._chunk), ids_M.split(self._chunk), strict=True):
            if len(ids_C):
                logits_CV = self._precision.wide(self._linear(hidden_CH))
                if self._temperature != 1.0:
                    logits_CV = self._precision.wide(divided(logits_CV, self._temperature))
                shifted_CV = logits_CV.sub_(logits_CV.amax(dim=-1, keepdim=True))
                taken_C1 = shifted_CV.gather(-1, ids_C[:, None])
                parts.append((taken_C1 - log(sum_of_units(exp(shifted_CV)))).squeeze(-1))
        return torch.cat(parts).to(torch.float64 if self._precision.dtype == torch.float64 else torch.float32)
