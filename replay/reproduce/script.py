"""Write a difference as a script that needs only torch and transformers, or vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from ...tracer.located import A, B
from ..locate.taps import outputs_of, with_tensors
from ..locate.vllm_execution import AnyExecution
from .calls import Calls, Name, NotWritable, written
from .search import SEED, Code, Difference, bfloat16, dtype_of, holding, num_ids, state

_MOST_LITERALS = 24
_WIDTH = 118
_NOT_IN_CONFIG = ("architectures", "dtype", "transformers_version", "model_type", "use_cache", "_name_or_path")


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    file: dict[str, Any]
    """Tensors that the script reads, by name."""

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def write(self, path: Path) -> Path | None:
        """Write the script, and its tensors beside it. Return the path of the tensors' file, or None."""
        path.write_text(self.text)
        if not self.file:
            return None
        torch.save(self.file, path.with_suffix(".pt"))
        return path.with_suffix(".pt")


class Writer:
    def __init__(self, found: Difference, sides: Mapping[str, AnyExecution], suspect: str):
        self._found, self._scope, self._sides = found, found.scope, sides
        self._suspect, self._reference = suspect, A if suspect == B else B
        self._file: dict[str, Any] = {}
        self._used: set[str] = set()
        """Sources of the weights that the script needs."""
        self._constants: dict[str, Any] = {}

    def script(self, header: str) -> Script:
        """Return the script. Raises NotWritable."""
        suspect, reference = self._suspect, self._reference
        codes = {reference: self._code(reference)}
        codes[suspect] = self._found.part or self._code(suspect, codes[reference].built)
        source = [line for side in (reference, suspect) for line in codes[side].setup] + self._numbers(
            codes[A].built or codes[B].built
        )
        names = ", ".join(["w", *(f"x{i}" for i in range(len(self._found.inputs)))])
        for side in (A, B):
            source += ["", "", f"def {side}({names}):", *(f"    {line}" for line in codes[side].body)]
        imports = {"import sys", "import torch", *(line for code in codes.values() for line in code.imports)}
        imports |= {"import torch.nn.functional as F"} if any("F." in line for line in source) else set()
        imports |= {"from pathlib import Path"} if self._file else set()
        lines = [
            f'"""{header}"""', "", *sorted(imports, key=lambda line: (line.startswith("from"), line)), "", *source, "", "",
            "def run(function, dtype):",
            "    values = [v.to(dtype, copy=True) if v.is_floating_point() else v.clone() for v in [*weights.values(), *inputs]]",
            "    return function(dict(zip(weights, values)), *values[len(weights) :]).double().flatten()", "", "",
            "with torch.no_grad():",
            f"    value_a, value_b = run(a, {codes[A].dtype}), run(b, {codes[B].dtype})",
            f"    exact = run({reference}, torch.float64)",
            f"error, rounding = (value_{suspect} - exact).abs(), (value_{reference} - exact).abs().max()",
            f"unit, at = torch.finfo({codes[suspect].dtype}).eps / 2, error.argmax()",
            "bound = 4 * max(float(rounding), unit * float(exact.abs().max()))",
            f'print(f"a {{value_a[at]:.9g}}, b {{value_b[at]:.9g}}, {reference} in float64 {{exact[at]:.9g}}")',
            f'print(f"error of {suspect} {{error[at]:.3g}}, of which rounding explains {{bound:.3g}}")',
            "sys.exit(0 if error[at] <= bound else 1)",
        ]  # fmt: skip
        return Script("\n".join(lines) + "\n", self._file)

    def _code(self, side: str, built: str = "") -> Code:
        """Return a side's source. `built` is the other side's module, if the script builds it."""
        found, scope = self._found, self._scope
        model, own = (scope.b, found.own) if side == self._suspect else (scope.a, {})
        module = scope.module(model)
        dtype = dtype_of(module, found.inputs)
        if own or self._sides[side].is_other_code or not type(module).__module__.startswith("transformers.models."):
            if found.part and not scope.path:
                raise NotWritable("vLLM needs the recorded model's class of transformers")
            return Code(body=self._calls(module, own, dtype), dtype=dtype)
        name, config, kind = f"module_{side}", model.config, type(model).__name__
        fields = [f"{field}={written(value)}" for field, value in _fields(config, scope.num_layers).items()]
        setup = ["config = deepcopy(config)"] if built else _filled(f"config = {type(config).__name__}(", fields, ")")
        kernels = ("attn", "experts") if any("experts" in each for each in state(module)) else ("attn",)
        setup += [f'config._{each}_implementation = "{getattr(config, f"_{each}_implementation")}"' for each in kernels]
        arguments = with_tensors(found.args, found.kwargs, [Name(i) for i in range(len(found.inputs))])
        xs = {i: f"x{i}" for i in range(len(found.inputs))}
        call = f"w, {', '.join(written(each, xs) for each in arguments)})"
        if scope.path:  # without memory for the whole model
            setup += ['with torch.device("meta"):', f'    {name} = {kind}(config).eval().get_submodule("{scope.path}")']
            call = f"functional_call({name}, {call}" + ("" if found.output is None else f"[{found.output}]")
        else:
            setup.append(f"{name} = {kind}(config).eval()")
            call = f"functional_call({name}.to(next(iter(w.values()))), {call}.logits.log_softmax(-1)"
            call += "[:, :-1].gather(-1, x0[:, 1:, None])" if found.part else ""
        self._used |= {f'w["{each}"]' for each in (found.weights if scope.path else module.state_dict())}
        imports = [
            f"from transformers import {type(config).__name__}, {kind}",
            "from torch.func import functional_call",
        ]
        imports += ["from copy import deepcopy"] if built else []
        return Code(imports=imports, setup=setup, body=[f"return {call}"], dtype=dtype, built=name)

    def _calls(self, module: Any, own: Mapping[str, Any], dtype: Any) -> list[str]:
        """Return the body of a function that makes the module's torch calls."""
        found = self._found
        inputs = [each.to(dtype) if each.is_floating_point() else each.clone() for each in found.inputs]
        keys = {name: f"{self._suspect}_{name}".replace(".", "_") if name in own else name for name in state(module)}
        named = {f"x{i}": each for i, each in enumerate(inputs)}
        named |= {f'w["{keys[name]}"]': each for name, each in state(module).items()}
        args, kwargs = with_tensors(found.args, found.kwargs, inputs)
        with holding(module, {**found.weights, **own}), Calls(named, len(self._constants)) as calls:
            given = outputs_of(self._scope.call(module, args, kwargs))[found.output or 0]
        body: list[str] = calls.source(given)
        used = calls.used(given)
        constants = {name: value for name, value in calls.constants.items() if f'w["{name}"]' in used}
        if found.random_weights and any(each.is_floating_point() and each.numel() > 1 for each in constants.values()):
            raise NotWritable("the code holds numbers that were computed from the model's weights")
        self._used |= used
        self._constants |= constants | {keys[name]: own[name] for name in own if f'w["{keys[name]}"]' in used}
        return body

    def _numbers(self, built: str) -> list[str]:
        """Return the lines that define `weights` and `inputs`."""
        found, scope = self._found, self._scope
        parameters = dict(scope.module(scope.a).named_parameters()) if found.random_weights else {}
        lines = [f"torch.manual_seed({SEED})"] if parameters or any(found.random_inputs) else []
        if parameters and built:
            lines.append(
                f"weights = {{n: torch.randn(p.shape) / p.shape[-1] ** 0.5 for n, p in {built}.named_parameters()}}"
            )
        elif parameters:
            shapes = [f"{written(name)}: {tuple(found.weights[name].shape)}" for name in parameters]
            lines += _filled("shapes = {", shapes, "}")
            lines.append("weights = {n: torch.randn(shape) / shape[-1] ** 0.5 for n, shape in shapes.items()}")
        else:
            lines.append("weights = {}")
        needed = {
            name: value
            for name, value in found.weights.items()
            if f'w["{name}"]' in self._used and name not in parameters
        }
        kept = {}
        for name, value in (needed | self._constants).items():
            if (text := literal(value)) is None:
                kept[name] = _kept(value)
            else:
                lines += _filled(f"weights[{written(name)}] = ", [text], "")
        if kept:
            self._file["weights"] = kept
            lines.append('weights |= file["weights"]')
        inputs = []
        for i, (value, is_random) in enumerate(zip(found.inputs, found.random_inputs, strict=True)):
            shape, text = tuple(value.shape), literal(value)
            if is_random:
                text = (
                    f"torch.randn({shape})"
                    if value.is_floating_point()
                    else f"torch.randint({num_ids(scope.a)}, {shape})"
                )
            elif text is None:
                self._file[f"x{i}"], text = _kept(value), f'file["x{i}"]'
            inputs.append(text)
        file = ['file = torch.load(Path(__file__).with_suffix(".pt"))'] if self._file else []
        return [*file, *lines, *_filled("inputs = [", inputs, "]")]


def literal(value: Any) -> str | None:
    """Return a small or regular tensor as source, or None."""
    shape, flat = tuple(value.shape), value.detach().cpu().flatten()
    if bool((flat == flat[:1]).all()):
        return f"torch.full({shape}, {written(flat[:1].sum().item())}, dtype={value.dtype})"
    if flat.tolist() == list(range(flat.numel())):
        return f"torch.arange({flat.numel()}, dtype={value.dtype}).reshape({shape})"
    if flat.numel() > _MOST_LITERALS:
        return None
    is_float32 = value.dtype == torch.float32  # written with the fewest digits
    numbers = [float(str(each)) for each in flat.numpy()] if is_float32 else flat.tolist()
    return f"torch.tensor({written(numbers)}, dtype={value.dtype})" + (f".reshape({shape})" if shape[1:] else "")


def _kept(value: Any) -> Any:
    """Return a tensor for the file, in bfloat16 if that changes nothing."""
    fewer = bfloat16(value)
    return (fewer if bool((fewer.to(value.dtype) == value).all()) else value).detach().cpu().clone()


def _fields(config: Any, num_layers: int | None) -> dict[str, Any]:
    """Return the arguments that build an equal configuration, or one with fewer layers."""
    usual, total = type(config)().to_dict(), len(getattr(config, "layer_types", None) or ())
    return {
        name: value[:num_layers] if isinstance(value, list) and len(value) == total else value
        for name, value in config.to_dict().items()
        if name in usual and value != usual[name] and name not in _NOT_IN_CONFIG
    }


def _filled(start: str, items: Sequence[str], end: str) -> list[str]:
    """Return comma-separated items in lines of at most `_WIDTH` characters."""
    one = f"{start}{', '.join(items)}{end}"
    if len(one) <= _WIDTH:
        return [one]
    if not end:
        start, end = f"{start}(", ")"
    whole = [each if len(each) > _WIDTH - 5 else each.replace(" ", "\0") for each in items]
    inner = wrap(", ".join(whole), _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [start, *(f"    {line}".replace("\0", " ") for line in inner), end]
