from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

CHUNK_BYTES = 56 << 20
"""Maximum chunk size on a GPU (bytes). A CPU chunk is a third as large, because it needs three temporary tensors."""


def optimizer_statistics(optimizer: Any) -> dict[str, Any]:
    """Return statistics for the last update and this process's weights, as 0-d tensors on the weights' device.

    For Adam and AdamW the update is lr (m_hat / (sqrt(v_hat) + eps) + decoupled weight decay), computed from the state
    after the step. For SGD with momentum it is lr times the momentum buffer (without Nesterov's look-ahead).

    - optimizer/update_to_weight: update norm divided by the weight norm.
    - optimizer/update_norm, optimizer/weight_norm: both computed after the update.
    - optimizer/second_moment: mean v_hat over all elements. Adam variants only.
    - optimizer/lr, beta1, beta2, eps, weight_decay, momentum: the largest over all parameter groups.

    The result is empty before the first step and for other optimizers. The device is not synchronised.
    """
    import torch

    with torch.no_grad():
        updates, weights, moments, num_elements = [], [], [], 0
        for chunk in _chunks(optimizer):
            update, second = _update(torch, *chunk)
            rate = chunk[0]["lr"]
            updates.append(_squared_norm(torch, update) * (rate * rate))
            weights.append(_squared_norm(torch, chunk[1]))
            if second is not None:
                moments.append(second)
                num_elements += sum(tensor.numel() for tensor in chunk[1])
        if not updates:
            return {}
        update_norm, weight_norm = _sum_of_scalars(torch, updates).sqrt(), _sum_of_scalars(torch, weights).sqrt()
        found = {"update_to_weight": update_norm / weight_norm, "update_norm": update_norm, "weight_norm": weight_norm}
        if moments:
            found["second_moment"] = _sum_of_scalars(torch, moments) / num_elements
        found |= _settings(optimizer.param_groups)
        return {f"optimizer/{name}": value for name, value in found.items()}


def _settings(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    flat = [dict(group) | dict(zip(("beta1", "beta2"), group.get("betas") or (), strict=False)) for group in groups]
    found: dict[str, Any] = {}
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum"):
        values = [group[name] for group in flat if group.get(name) is not None]
        if values:
            found[name] = max(values) if all(isinstance(value, (int, float)) for value in values) else values[0]
    return found


Chunk = tuple[Mapping[str, Any], list[Any], list[Mapping[str, Any]]]
"""A parameter group's settings, some of its tensors or tensor pieces, and the optimizer state for each."""


def _chunks(optimizer: Any) -> Iterator[Chunk]:
    for group in optimizer.param_groups:
        alike: dict[Any, Chunk] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) or {}
            if not {"exp_avg_sq", "exp_avg"} <= state.keys() and state.get("momentum_buffer") is None:
                continue
            key = (parameter.device, parameter.dtype, tuple(state), _known_step(state))
            item = parameter.element_size()
            most = CHUNK_BYTES // item if parameter.is_cuda else CHUNK_BYTES // 3 // max(4, item)
            for piece, its_state in _pieces(_local(parameter), state, most):
                _, tensors, states = alike.setdefault(key, (group, [], []))
                if sum(tensor.numel() for tensor in tensors) + piece.numel() > most and tensors:
                    yield alike.pop(key)
                    _, tensors, states = alike.setdefault(key, (group, [], []))
                tensors.append(piece)
                states.append(its_state)
        yield from alike.values()


def _pieces(weight: Any, state: Mapping[str, Any], most: int) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    if weight.numel() <= most:
        yield weight, state
        return
    whole = {name: _local(value) for name, value in state.items()}
    beside = {name: value for name, value in whole.items() if getattr(value, "shape", None) == weight.shape}
    longest = max(range(weight.ndim), key=lambda dim: weight.shape[dim])
    length = max(1, most * weight.shape[longest] // weight.numel())
    for piece, *others in zip(*(t.split(length, dim=longest) for t in (weight, *beside.values())), strict=True):
        yield piece, whole | dict(zip(beside, others, strict=True))


def _update(torch: Any, group: Mapping[str, Any], weights: list[Any], states: Sequence[Any]) -> tuple[list[Any], Any]:
    if "exp_avg_sq" not in states[0]:
        return [_local(state["momentum_buffer"]) for state in states], None
    beta1, beta2 = group["betas"]
    known = _known_step(states[0])
    step = states[0]["step"] if known is None else max(known, 1.0)
    scale1, scale2 = 1 - beta1**step, 1 - beta2**step
    # amsgrad divides by the largest second moment so far.
    largest = "max_exp_avg_sq" if "max_exp_avg_sq" in states[0] else "exp_avg_sq"
    update = torch._foreach_sqrt([_local(state[largest]) for state in states])
    torch._foreach_div_(update, scale2**0.5)
    torch._foreach_add_(update, group["eps"])
    torch._foreach_reciprocal_(update)
    torch._foreach_mul_(update, [_local(state["exp_avg"]) for state in states])
    torch._foreach_div_(update, scale1)
    if group.get("decoupled_weight_decay") and group.get("weight_decay"):
        torch._foreach_add_(update, weights, alpha=float(group["weight_decay"]))
    return update, _sum(torch, [_local(state["exp_avg_sq"]) for state in states]) / scale2


def _squared_norm(torch: Any, tensors: list[Any]) -> Any:
    dtype = _dtype_of_sums(torch, tensors)
    if tensors[0].device.type == "cpu":
        return torch.stack([_squared_norm_on_cpu(torch, tensor.reshape(-1), dtype) for tensor in tensors]).sum().float()
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum().float()


def _squared_norm_on_cpu(torch: Any, values_N: Any, dtype: Any, width: int = 256) -> Any:
    """Sum the squared norms of short pieces. torch.norm would add all values in order, which loses precision."""
    whole = len(values_N) // width * width
    norms_P = torch.linalg.vector_norm(values_N[:whole].view(-1, width), dim=1, dtype=dtype)
    return norms_P.square().sum() + torch.linalg.vector_norm(values_N[whole:], dtype=dtype).square()


def _sum(torch: Any, tensors: list[Any]) -> Any:
    dtype = _dtype_of_sums(torch, tensors)
    if tensors[0].device.type == "cpu":
        return torch.stack([tensor.sum(dtype=dtype) for tensor in tensors]).sum().float()
    return torch.stack(torch._foreach_norm(tensors, 1, dtype=dtype)).sum().float()


def _dtype_of_sums(torch: Any, tensors: list[Any]) -> Any:
    return torch.promote_types(tensors[0].dtype, torch.float32)


def _sum_of_scalars(torch: Any, values: list[Any]) -> Any:
    device = values[0].device
    return torch.stack([value.to(device, non_blocking=True) for value in values]).sum()


def _known_step(state: Mapping[str, Any]) -> Any:
    """Return the step count, or None if it is on a GPU, where all parameters are assumed to have the same count."""
    step = state.get("step")
    if isinstance(step, (int, float)) or step is None:
        return step
    return float(step) if step.device.type == "cpu" else None


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def underlying(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if hasattr(optimizer, "param_groups") and hasattr(optimizer, "state") else None
