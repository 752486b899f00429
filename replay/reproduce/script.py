"""Write a difference as a script that needs only torch and transformers, or vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from ..locate.names import layer_of
from ..locate.taps import outputs_of, with_tensors
from ..locate.vllm_execution import AnyExecution
from .calls import Calls, NotWritable, Source, written
from .search import SEED, Difference, bfloat16, dtype_of, holding, num_ids, state
from .vllm_parts import VllmPart

_MOST_LITERALS = 24
_WIDTH = 118
_SETTINGS = (
    'VLLM_LOGGING_LEVEL="ERROR"', 'VLLM_ENABLE_V1_MULTIPROCESSING="0"', 'VLLM_CPU_KVCACHE_SPACE="1"', 'TORCHDYNAMO_DISABLE="1"'
)  # fmt: skip
"""Environment variables in scripts for vLLM. The last ones save time."""
_STANDARD = {
    "os.environ": "import os", "sys.": "import sys", "deepcopy(": "from copy import deepcopy",
    "Path(": "from pathlib import Path", "TemporaryDirectory(": "from tempfile import TemporaryDirectory",
}  # fmt: skip
"""Text in a script -> import that it needs."""
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
    def __init__(
        self,
        found: Difference,
        sides: Mapping[str, AnyExecution],
        suspect: str,
        header: str,
        part: VllmPart | None = None,
    ):
        self._scope, self._found, self._header, self._part = found.scope, found, header, part
        self._suspect, self._reference = suspect, "a" if suspect == "b" else "b"
        self._sides = sides
        self._file: dict[str, Any] = {}
        self._imports: list[str] = []
        self._used: set[str] = set()
        self._config_lines: list[str] = []
        self._drawn = ""
        """Name of a built module whose parameters the script draws, or an empty string."""
        self._constants: dict[str, Any] = {}

    def script(self) -> Script:
        """Return the script. Raises NotWritable."""
        found, scope, part = self._found, self._scope, self._part
        with torch.no_grad(), scope.cut():
            modules = {self._suspect: scope.module(scope.b), self._reference: scope.module(scope.a)}
            bodies, setup = {}, list[str]()
            if part is not None:
                self._imports += part.imports
                setup += part.setup
                bodies[self._suspect] = [*part.body]
                del modules[self._suspect]
            for side, module in modules.items():
                own = found.own if side == self._suspect else {}
                is_cut = any(value.shape != found.weights.get(name, value).shape for name, value in state(module))
                is_other = own or is_cut or self._sides[side].is_other_code
                built = None if is_other else self._built(module, f"module_{side}")
                setup += built[0] if built else []
                bodies[side] = built[1] if built else self._calls(module, own)
                if part is not None and not (built or scope.path):
                    raise NotWritable("vLLM needs the recorded model's class of transformers")
            numbers = self._numbers(modules[self._reference], bool(setup))
            dtypes = {side: dtype_of(module, found.inputs) for side, module in modules.items()}
            if part is not None:
                dtypes[self._suspect] = dtype_of(self._sides[self._suspect].model, [])
        names = ", ".join(["w", *(f"x{i}" for i in range(len(found.inputs)))])
        functions: list[str] = []
        for side in "ab":
            functions += ["", "", f"def {side}({names}):", *(f"    {line}" for line in bodies[side])]
        source = [*setup, *numbers, *functions]
        text = "\n".join([*source, "sys.", "os.environ" if part else ""])
        lines = [
            f'"""{self._header}"""', "", *(line for word, line in _STANDARD.items() if word in text), "",
            *([*_filled("os.environ.update(", _SETTINGS, ")"), ""] if part else []), "import torch",
            *(["import torch.nn.functional as F"] if "F." in text else []), *dict.fromkeys(self._imports), "",
            *source, "", "",
            "def run(function, dtype):",
            "    values = [v.to(dtype, copy=True) if v.is_floating_point() else v.clone() for v in [*weights.values(), *inputs]]",
            "    return function(dict(zip(weights, values)), *values[len(weights) :]).double().flatten()", "", "",
            "with torch.no_grad():",
            f"    value_a, value_b, exact = run(a, {dtypes['a']}), run(b, {dtypes['b']}), run({self._reference}, torch.float64)",
            f"error, rounding = (value_{self._suspect} - exact).abs(), (value_{self._reference} - exact).abs().max()",
            f"unit, at = torch.finfo({dtypes[self._suspect]}).eps / 2, error.argmax()",
            "bound = 4 * max(float(rounding), unit * float(exact.abs().max()))",
            f'print(f"a {{value_a[at]:.9g}}, b {{value_b[at]:.9g}}, {self._reference} in float64 {{exact[at]:.9g}}")',
            f'print(f"error of {self._suspect} {{error[at]:.3g}}, of which rounding explains {{bound:.3g}}")',
            "sys.exit(0 if error[at] <= bound else 1)",
        ]  # fmt: skip
        return Script("\n".join(lines) + "\n", self._file)

    # --- functions ------------------------------------------------------------------------------------------------------

    def _calls(self, module: Any, own: Mapping[str, Any]) -> list[str]:
        """Return the body of a function that makes the module's torch calls."""
        found, scope, dtype = self._found, self._scope, dtype_of(module, self._found.inputs)
        inputs = [each.to(dtype) if each.is_floating_point() else each.clone() for each in found.inputs]
        named = {f"x{i}": each for i, each in enumerate(inputs)}
        named |= {f'w["{f"{self._suspect}." if name in own else ""}{name}"]': value for name, value in state(module)}
        args, kwargs = with_tensors(found.args, found.kwargs, inputs)
        with holding(module, {**found.weights, **own}), Calls(named, len(self._constants)) as calls:
            given = scope.call(module, args, kwargs)[found.output]
        body: list[str] = calls.source(given)
        used = calls.used(given)
        self._used |= used
        constants = {name: value for name, value in calls.constants.items() if f'w["{name}"]' in used}
        if found.random_weights and any(each.is_floating_point() and each.numel() > 1 for each in constants.values()):
            raise NotWritable("the code holds numbers that were computed from the model's weights")
        own = {f"{self._suspect}.{name}": value for name, value in own.items()}
        self._constants |= constants | {name: value for name, value in own.items() if f'w["{name}"]' in used}
        return body

    def _built(self, module: Any, name: str) -> tuple[list[str], list[str]] | None:
        """Return the lines that build the module from its class in transformers, and the body of a function that runs
        it, or None if the class is not in transformers or has unknown arguments."""
        kind = type(module)
        if not kind.__module__.startswith("transformers.models."):
            return None
        arguments = []
        for argument, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
            value = self._argument(module, argument)
            if value is None and parameter.default is inspect.Parameter.empty:
                return None
            if value is not None:
                arguments.append(value if parameter.default is inspect.Parameter.empty else f"{argument}={value}")
        found, setup, body = self._found, list[str](), list[str]()
        like = next(
            (f"x{i}" for i, each in enumerate(found.inputs) if each.is_floating_point()), "next(iter(w.values()))"
        )
        self._imports.append(f"from {kind.__module__} import {kind.__name__}")
        if "config" in arguments:
            config = self._config(module)
            self._imports.insert(0, f"from transformers import {type(config).__name__}")
            fields = _fields(config, self._scope.num_layers)
            words = [f"{field}={written(value)}" for field, value in fields.items()]
            lines = _filled(f"config = {type(config).__name__}(", words, ")")
            setup += ["config = deepcopy(config)"] if lines == self._config_lines else lines
            self._config_lines = self._config_lines or lines
            setup.append(f"config._attn_implementation = {written(config._attn_implementation)}")
            if any("experts" in name for name, _ in module.named_modules()) or "Experts" in kind.__name__:
                experts = written(config._experts_implementation)
                setup.append(f"config._experts_implementation = {experts}")
                if "grouped" in experts:  # the kernel does not support float64, which the exact result needs
                    body.append(
                        f'config._experts_implementation = "eager" if {like}.dtype == torch.float64 else {experts}'
                    )
        args, kwargs = with_tensors(found.args, found.kwargs, [Source(f"x{i}") for i in range(len(found.inputs))])
        call = ", ".join([*map(written, args), *(f"{word}={written(value)}" for word, value in kwargs.items())])
        setup.append(f"{name} = {kind.__name__}({', '.join(arguments)}).eval()")
        body += [
            f"{name}.to({like}).load_state_dict(w, strict=False)", f"return {name}({call}){self._output(module)}",
        ]  # fmt: skip
        self._drawn = self._drawn or name
        return setup, body

    def _argument(self, module: Any, name: str) -> str | None:
        if name == "config":
            return "config" if self._config(module) is not None else None
        value = getattr(module, name, layer_of(self._scope.path) if name == "layer_idx" else None)
        if name in ("args", "kwargs", "device") or value is None or isinstance(value, torch.Tensor | torch.nn.Module):
            return None
        try:
            return written(value)
        except NotWritable:
            return None

    def _config(self, module: Any) -> Any:
        return getattr(module, "config", None) or self._scope.a.config.get_text_config()

    def _output(self, module: Any) -> str:
        if not self._scope.path:
            return ".logits.log_softmax(-1)" + ("[:, :-1].gather(-1, x0[:, 1:, None])" if self._part else "")
        with holding(module, self._found.weights):
            given = module(*self._found.args, **self._found.kwargs)
        if isinstance(given, torch.Tensor):
            return ""
        wanted = outputs_of(given)[self._found.output]
        place = next((i for i, each in enumerate(given) if each is wanted), None)
        if place is None:
            raise NotWritable("the differing output is nested")
        return f"[{place}]"

    # --- numbers --------------------------------------------------------------------------------------------------------

    def _numbers(self, module: Any, is_built: bool) -> list[str]:
        """Return the lines that define `weights` and `inputs`."""
        found = self._found
        parameters = dict(module.named_parameters())
        needed = set(module.state_dict()) if is_built else set()
        needed |= {name for name in found.weights if f'w["{name}"]' in self._used}
        lines = [f"torch.manual_seed({SEED})"] if found.random_weights or any(found.random_inputs) else []
        if found.random_weights:
            shapes = {name: tuple(value.shape) for name, value in found.weights.items() if name in parameters}
            if self._drawn:
                named = f"{self._drawn}.named_parameters()"
                lines.append(f"weights = {{n: torch.randn(p.shape) / p.shape[-1] ** 0.5 for n, p in {named}}}")
            else:
                lines += _filled("shapes = {", [f"{written(name)}: {shape}" for name, shape in shapes.items()], "}")
                lines.append("weights = {n: torch.randn(shape) / shape[-1] ** 0.5 for n, shape in shapes.items()}")
            needed -= set(shapes)
        values = {name: found.weights[name] for name in found.weights if name in needed} | self._constants
        long = {name: value for name, value in values.items() if literal(value) is None}
        if long:
            self._file["weights"] = {name: _kept(value) for name, value in long.items()}
            lines.append('weights |= file["weights"]' if found.random_weights else 'weights = file["weights"]')
        elif not found.random_weights:
            lines.append("weights = {}")
        for name, value in values.items():
            if name not in long:
                lines += _filled(f'weights["{name}"] = ', [literal(value) or ""], "")
        inputs = []
        for i, (value, is_random) in enumerate(zip(found.inputs, found.random_inputs, strict=True)):
            text = literal(value)
            if is_random and value.is_floating_point():
                text = f"torch.randn({tuple(value.shape)})"
            elif is_random:
                text = f"torch.randint({num_ids(self._scope.a)}, {tuple(value.shape)})"
            if text is None:
                self._file[f"x{i}"], text = _kept(value), f'file["x{i}"]'
            inputs.append(text)
        if self._file:
            lines.insert(0, 'file = torch.load(Path(__file__).with_suffix(".pt"))')
        return [*lines, *_filled("inputs = [", inputs, "]")]


def literal(value: Any) -> str | None:
    """Return a small or regular tensor as source, or None."""
    flat = value.detach().cpu().flatten()
    if flat.numel() == 0:
        return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
    if not value.is_floating_point() and value.dtype != torch.bool and flat.tolist() == list(range(flat.numel())):
        return f"torch.arange({flat.numel()}).reshape({tuple(value.shape)})"
    if bool((flat == flat[0]).all()):
        return f"torch.full({tuple(value.shape)}, {written(flat[0].item())}, dtype={value.dtype})"
    if flat.numel() > _MOST_LITERALS and value.is_floating_point():
        return None
    if flat.numel() > 4 * _MOST_LITERALS:
        return None
    if value.dtype == torch.float32:  # the fewest digits
        numbers = [float(str(each)) for each in flat.numpy()]
        return f"torch.tensor({numbers})" + ("" if value.dim() == 1 else f".reshape({tuple(value.shape)})")
    return f"torch.tensor({written(value.tolist())}, dtype={value.dtype})"


def _kept(value: Any) -> Any:
    """Return a tensor for the file, in bfloat16 if that changes nothing."""
    fewer = bfloat16(value)
    return (fewer if bool((fewer.to(value.dtype) == value).all()) else value).detach().cpu().clone()


def _fields(config: Any, num_layers: int | None) -> dict[str, Any]:
    """Return the fewest arguments that build an equal configuration, or one with fewer layers."""
    kind = type(config)
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_IN_CONFIG}
    if num_layers is not None:
        total = len(getattr(config, "layer_types", None) or ())
        fields = {
            name: value[:num_layers] if isinstance(value, list) and len(value) == total else value
            for name, value in fields.items()
        } | {"num_hidden_layers": num_layers}  # fmt: skip
    whole = kind(**fields).to_dict()
    for name in list(fields):
        fewer = {each: value for each, value in fields.items() if each != name}
        try:
            if kind(**fewer).to_dict() == whole:
                fields = fewer
        except Exception:  # the other fields need it; transformers can raise anything for a bad config
            continue
    return fields


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
