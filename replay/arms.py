"""What a replay changes against the recording."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..schemas.errors import InvalidOption

DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What --dtype takes -> torch's name of the weights' dtype."""
ATTENTIONS = ("eager", "math", "flash", "efficient", "cudnn", "flex")
QUANTIZATIONS = ("int8", "int4", "fp8")
PADDINGS = ("left", "right")
ENGINES = ("hf", "vllm")
AS_RECORDED = "as-recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A replay configuration. None, or the default, is "as recorded"."""

    name: str = ""
    """The pass is `replay/<name>`; made of the changes when it is not given."""
    engine: str = "hf"
    """`hf`: the rebuilt transformers model; `vllm`: vLLM on the same weights."""
    dtype: str | None = None
    """Of weights and activations: a key of DTYPES."""
    quantize: str | None = None
    """Weight-only fake quantisation of linear layers but the head: int8, int4 or fp8, in groups of 128 inputs."""
    lm_head: str | None = None
    """`fp32`: the head's projection in float32."""
    logits_dtype: str | None = None
    """Of the logits before the logprob: fp64, fp32, bf16, fp16."""
    attention: str | None = None
    """Attention kernel: one of ATTENTIONS."""
    batch_size: int | None = None
    """Rows of a forward."""
    padding: str | None = None
    """Side of the padding: left or right."""
    mode: str = "prefill"
    """`prefill`; `decode`: one token at a time through the KV cache; `chunked:N`: N at a time."""
    threads: int | None = None
    """Threads of a CPU operation."""
    prefix_caching: str | None = None
    """vLLM's, on or off."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    weights_version: int | None = None
    """Score with the weights of this policy version instead of the step's own."""

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ENGINES)
        _one_of("prefix-caching", self.prefix_caching, ("on", "off"))
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("lm-head", self.lm_head, ("fp32",))
        _one_of("logits-dtype", self.logits_dtype, tuple(name for name in DTYPES if name != "tf32"))
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("padding", self.padding, PADDINGS)
        if not re.fullmatch(r"prefill|decode|chunked:[1-9]\d*", self.mode):
            raise InvalidOption(f"mode: got {self.mode!r}; use prefill, decode or chunked:N")
        for name, value in (("batch-size", self.batch_size), ("threads", self.threads)):
            if value is not None and value < 1:
                raise InvalidOption(f"{name}: got {value}; use 1 or more")
        self._check_engine()
        if self.temperature is not None and self.temperature <= 0:
            raise InvalidOption(f"temperature: got {self.temperature}; use a number above 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidOption(f"top-p: got {self.top_p}; use a number above 0 and up to 1")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidOption(f"top-k: got {self.top_k}; use 1 or more")
        if not self.name:
            object.__setattr__(self, "name", self._made_name())

    def _check_engine(self) -> None:
        if self.engine == "hf":
            if self.prefix_caching is not None:
                raise InvalidOption("prefix-caching: is vLLM's; add --engine vllm")
            return
        names = ("quantize", "lm_head", "logits_dtype", "attention", "padding", "deterministic", "threads")
        set_here = [name.replace("_", "-") for name in names if getattr(self, name)]
        if set_here:
            raise InvalidOption(
                f"{set_here[0]}: vLLM has no such setting here; with --engine vllm use dtype, mode, batch-size, "
                "prefix-caching, temperature, top-p, top-k, weights-version"
            )

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the recording: field -> value."""
        default = Arm.__dataclass_fields__
        return {key: value for key, value in asdict(self).items() if key != "name" and value != default[key].default}

    @property
    def is_identity(self) -> bool:
        """Whether nothing differs from the recording."""
        return not self.changes

    @property
    def cached_tokens(self) -> int | None:
        """Response tokens that go through the KV cache at a time; None for one forward over everything."""
        if self.mode == "prefill":
            return None
        return 1 if self.mode == "decode" else int(self.mode.partition(":")[2])

    def _made_name(self) -> str:
        if self.is_identity:
            return AS_RECORDED
        words = {
            "engine": "",
            "quantize": "",
            "dtype": "",
            "attention": "",
            "mode": "",
            "deterministic": "deterministic",
            "lm_head": "head-",
        }
        parts = [
            words.get(key, key.replace("_", "-") + "-") + ("" if value is True else str(value).replace(":", "-"))
            for key, value in self.changes.items()
        ]
        return "+".join(parts)


def parse_arm(text: str) -> Arm:
    """Read `dtype=fp16,attention=eager`, with the options' names; `name=...` names the arm.

    >>> parse_arm("dtype=fp16,batch-size=1").name
    'fp16+batch-size-1'
    """
    kinds = {field.name: str(field.type) for field in fields(Arm)}
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if name not in kinds or (not equals and kinds[name] != "bool"):
            raise InvalidOption(
                f"arm: got {part!r}; write changes as name=value with commas between them, as dtype=fp16,batch-size=1; "
                f"names: {', '.join(sorted(key.replace('_', '-') for key in kinds))}"
            )
        values[name] = _typed(name, value.strip(), kinds[name], equals)
    return Arm(**values)


def named(arm: Arm, name: str) -> Arm:
    """The arm under another name."""
    return replace(arm, name=name)


def _typed(name: str, value: str, kind: str, equals: str) -> Any:
    try:
        if kind == "bool":
            return {"": True, "true": True, "false": False}[value.lower() if equals else ""]
        return int(value) if kind.startswith("int") else float(value) if kind.startswith("float") else value
    except (ValueError, KeyError) as error:
        raise InvalidOption(f"arm: {name.replace('_', '-')} cannot be {value!r}") from error


def _one_of(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidOption(f"{name}: got {value!r}; use {', '.join(choices)}")
