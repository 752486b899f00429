"""A KV cache that holds its keys and values in fewer bits than the model computes in."""

from __future__ import annotations

from typing import Any


def kv_cache(config: Any, kv_dtype: str | None) -> Any:
    """transformers' cache for a model; with `fp8`, all that goes in is rounded to e4m3 at scale 1, as vLLM does.

    vLLM's own scales are 1 unless a checkpoint brings others (its documentation, "Quantized KV cache"). Attention reads
    what the cache holds, for the tokens that just went in too. Values beyond 448 saturate.
    """
    import torch
    from transformers import DynamicCache

    if kv_dtype is None:
        return DynamicCache(config=config)
    largest = torch.finfo(torch.float8_e4m3fn).max

    class Fp8Cache(DynamicCache):  # type: ignore[misc]
        """Rounds what it is given."""

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            def rounded(states: Any) -> Any:
                return states.clamp(-largest, largest).to(torch.float8_e4m3fn).to(states.dtype)

            return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    return Fp8Cache(config=config)
