"""Write a difference as a script that needs only torch and transformers, or vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import torch

from ...tracer.located import A, B
from ..locate.execution import Execution
from ..locate.taps import outputs_of, with_tensors
from .calls import Calls, Name, NotWritable
from .search import SEED, Code, Difference, dtype_of, holding, num_ids, state

_MOST_LITERALS = 24
_WIDTH = 118
_IMPORTS = {
    "os.": "import os", "torch.": "import torch", "F.": "import torch.nn.functional as F",
    "deepcopy(": "from copy import deepcopy", "inf": "from math import inf",
    "TemporaryDirectory(": "from tempfile import TemporaryDirectory",
    "functional_call(": "from torch.func import functional_call",
}  # fmt: skip
"""Maps text in a script to the import that it requires."""
_NOT_IN_CONFIG = ("architectures", "dtype", "transformers_version", "model_type", "use_cache", "_name_or_path")


class Writer:
    def __init__(self, found: Difference, sides: Mapping[str, Execution], suspect: str):
        self._found, self._scope, self._sides = found, found.scope, sides
        self._suspect, self._reference = suspect, A if suspect == B else B
        self._file: dict[str, Any] = {}
        self._used: set[str] = set()
        """Source expressions of the weights that the script needs."""
        self._constants: dict[str, Any] = {}

    def script(self, header: str) -> tuple[str, dict[str, Any]]:
        """Return the script's text, and the tensors that it reads from its file, by name. Raises NotWritable."""
        suspect, reference = self._suspect, self._reference
        codes = {reference: self._code(reference)}
        codes[suspect] = self._found.part or self._code(suspect, codes[reference].built)
        source = [line for side in (reference, suspect) for line in codes[side].setup]
        source += self._numbers(codes[reference].built or codes[suspect].built)
        names = ", ".join(["w", *(f"x{i}" for i in range(len(self._found.inputs)))])
        for side in (A, B):
            source += ["", "", f"def {side}({names}):", *(f"    {line}" for line in codes[side].body)]
        imports = [line for word, line in _IMPORTS.items() if any(word in each for each in source)]
        runs = [f"run({side}, {codes[side].dtype})" for side in (A, B)]
        text = "\n".join([
            *imports, "", *source, "", "",
            "def run(function, dtype):",
            "    values = [v.to(dtype, copy=True) if v.is_floating_point() else v.clone() for v in [*weights.values(), *inputs]]",
            "    return function(dict(zip(weights, values)), *values[len(weights) :]).double().flatten()", "", "",
            "with torch.no_grad():",
            f"    value_a, value_b, exact = {', '.join(runs)}, run({reference}, torch.float64)",
            f"error, rounding = (value_{suspect} - exact).abs(), (value_{reference} - exact).abs().max()",
            f"unit, at = torch.finfo({codes[suspect].dtype}).eps / 2, error.argmax()",
            "bound = 4 * max(float(rounding), unit * float(exact.abs().max()))",
            f"print(f'a {{value_a[at]:.9g}}, b {{value_b[at]:.9g}}, {reference} in float64 {{exact[at]:.9g}}')",
            f"print(f'error of {suspect} {{error[at]:.3g}}, rounding bound {{bound:.3g}}')",
            "raise SystemExit(0 if error[at] <= bound else 1)", "",
        ])  # fmt: skip
        return f'"""{header}"""\n\n' + text.replace("'", '"'), self._file

    def _code(self, side: str, built: str = "") -> Code:
        """Return a side's source. `built` is the variable of the other side's module, or "" if none is built."""
        found, scope = self._found, self._scope
        model, own = (scope.b, found.own) if side == self._suspect else (scope.a, {})
        module = scope.module(model)
        dtype = dtype_of(module, found.inputs)
        if own or self._sides[side].is_other_code or not type(module).__module__.startswith("transformers.models."):
            if found.part and not scope.path:
                raise NotWritable("vLLM can load the recorded model only if its class is part of transformers")
            return Code(body=self._calls(module, own, dtype), dtype=dtype)
        name, config, kind = f"module_{side}", model.config, type(model).__name__
        fields = [f"{field}={value!r}" for field, value in _fields(config).items()]
        setup = ["config = deepcopy(config)"]
        if not built:
            setup = [f"from transformers import {type(config).__name__}, {kind}"]
            setup += _filled(f"config = {type(config).__name__}(", fields, ")")
        kernels = ("attn", "experts") if any("experts" in each for each in state(model)) else ("attn",)
        setup += [f"config._{each}_implementation = {getattr(config, f'_{each}_implementation')!r}" for each in kernels]
        args, kwargs = with_tensors(found.args, found.kwargs, [Name(f"x{i}") for i in range(len(found.inputs))])
        if scope.path:  # without memory for the whole model
            setup += ["with torch.device('meta'):", f"    {name} = {kind}(config).eval().get_submodule('{scope.path}')"]
            output = "" if found.output is None else f"[{found.output}]"
        else:
            setup.append(f"{name} = {kind}(config).eval()")
            output = ".logits.log_softmax(-1)" + ("[:, :-1].gather(-1, x0[:, 1:, None])" if found.part else "")
        called = name if scope.path else f"{name}.to(next(iter(w.values())))"
        self._used |= {f'w["{each}"]' for each in (found.weights if scope.path else module.state_dict())}
        return Code(
            setup=setup, dtype=dtype, built=name,
            body=_filled("return functional_call(", [called, "w", repr(args), repr(kwargs)], f"){output}"),
        )  # fmt: skip

    def _calls(self, module: Any, own: Mapping[str, Any], dtype: Any) -> list[str]:
        """Return the body of a function that repeats the module's torch calls."""
        found = self._found
        inputs = [each.to(dtype) if each.is_floating_point() else each.clone() for each in found.inputs]
        keys = {name: f"{self._suspect}_{name}".replace(".", "_") if name in own else name for name in state(module)}
        named = {f"x{i}": each for i, each in enumerate(inputs)}
        named |= {f'w["{keys[name]}"]': each for name, each in state(module).items()}
        args, kwargs = with_tensors(found.args, found.kwargs, inputs)
        with holding(module, {**found.weights, **own}), Calls(named, self._constants) as calls:
            given = outputs_of(self._scope.call(module, args, kwargs))[found.output or 0]
        body: list[str]
        body, used = calls.source(given)
        computed = [value for name, value in self._constants.items() if f'w["{name}"]' in used]
        if found.random_weights and any(each.is_floating_point() and each.numel() > 1 for each in computed):
            raise NotWritable("the code contains constants computed from the model's weights")
        self._used |= used
        self._constants |= {keys[name]: value for name, value in own.items()}
        return body

    def _numbers(self, built: str) -> list[str]:
        """Return the lines that define `inputs` and `weights`."""
        found, scope = self._found, self._scope
        parameters = dict(scope.module(scope.a).named_parameters()) if found.random_weights else {}
        inputs = []
        for i, (value, is_random) in enumerate(zip(found.inputs, found.random_inputs, strict=True)):
            if is_random:
                kind = "randn(" if value.is_floating_point() else f"randint({num_ids(scope.a)}, "
            inputs.append(f"torch.{kind}{tuple(value.shape)})" if is_random else self._number(f"x{i}", value))
        values = {**found.weights, **self._constants}
        needed = [name for name in values if f'w["{name}"]' in self._used and name not in parameters]
        weights = {name: self._number(name, values[name]) for name in needed}
        lines = ["file = torch.load(__file__[:-2] + 'pt')"] if self._file else []
        lines += [f"torch.manual_seed({SEED})"] if parameters or any(found.random_inputs) else []
        lines += _filled("inputs = [", inputs, "]")
        named = f"{built}.named_parameters()"
        if parameters and not built:
            named = "empty.items()"
            shapes = [f"{name!r}: torch.empty({tuple(found.weights[name].shape)})" for name in parameters]
            lines += _filled("empty = {", shapes, "}")
        drawn = f"{{n: torch.randn(p.shape) / p.shape[-1] ** 0.5 for n, p in {named}}}" if parameters else "{}"
        lines.append(f"weights = {drawn}" + (" | file" if self._file.keys() & weights.keys() else ""))
        for name, text in weights.items():
            lines += [] if name in self._file else _filled(f"weights[{name!r}] = ", [text], "")
        return lines

    def _number(self, name: str, value: Any) -> str:
        """Return source code for a tensor. Long tensors are added to the file, from which the code reads them."""
        shape, flat = tuple(value.shape), value.detach().cpu().flatten()
        if bool((flat == flat[:1]).all()):
            return f"torch.full({shape}, {flat[:1].sum().item()}, dtype={value.dtype})"
        if value.dtype == torch.int64 and flat.tolist() == list(range(flat.numel())):
            return f"torch.arange({flat.numel()}).reshape({shape})"
        if flat.numel() <= _MOST_LITERALS:
            is_float32 = value.dtype == torch.float32  # written with the fewest digits
            numbers = [float(str(each)) for each in flat.numpy()] if is_float32 else flat.tolist()
            return f"torch.tensor({numbers}, dtype={value.dtype})" + (f".reshape({shape})" if shape[1:] else "")
        fewer = value.bfloat16() if value.is_floating_point() else value
        self._file[name] = (fewer if bool((fewer.to(value) == value).all()) else value).detach().cpu().clone()
        return f"file.pop({name!r})"


def _fields(config: Any) -> dict[str, Any]:
    """Return the arguments for an equal configuration. Per-layer lists are cut to its current number of layers."""
    count, total = getattr(config, "num_hidden_layers", None), len(getattr(config, "layer_types", None) or ())
    counted = {} if count is None else {"num_hidden_layers": count}
    usual = type(config)(**counted).to_dict()
    fields = {
        name: value[:count] if isinstance(value, list) and len(value) == total else value
        for name, value in config.to_dict().items()
        if name in usual and name not in _NOT_IN_CONFIG
    }
    return counted | {name: value for name, value in fields.items() if value != usual[name]}


def _filled(start: str, items: Sequence[str], end: str) -> list[str]:
    """Wrap comma-separated items between `start` and `end` into lines of at most `_WIDTH` characters."""
    one = f"{start}{', '.join(items)}{end}"
    if len(one) <= _WIDTH:
        return [one]
    if not end:
        start, end = f"{start}(", ")"
    whole = [each if len(each) > _WIDTH - 5 else each.replace(" ", "\0") for each in items]
    inner = wrap(", ".join(whole), _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [start, *(f"    {line}".replace("\0", " ") for line in inner), end]
