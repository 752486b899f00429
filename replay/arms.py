"""What a replay changes against the recording."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..schemas.errors import InvalidOption, option

DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What --dtype takes -> torch's name of the weights' dtype."""
ATTENTIONS = ("eager", "math", "flash", "efficient", "cudnn", "flex")
QUANTIZATIONS = ("int8", "int4", "fp8")
PADDINGS = ("left", "right", "packed", "shared")
KV_DTYPES = ("fp8",)
PACKABLE = (None, "math", "flash", "efficient", "cudnn")
"""What --attention may be in packed and shared forwards."""
ROUTINGS = ("recorded",)
ENGINES = ("hf", "vllm", "exact")
AS_RECORDED = "as-recorded"
_OF_VLLM = ("prefix_caching", "attention_backend", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len")
_NOT_OF = {
    "hf": _OF_VLLM,
    "vllm": (
        "quantize", "lm_head", "logits_dtype", "attention", "padding", "deterministic", "threads", "compile", "routing",
    ),
    "exact": (
        *_OF_VLLM, "logits_dtype", "attention", "kv_dtype", "deterministic", "compile", "top_k", "top_p", "routing",
    ),
}  # fmt: skip
"""Engine -> settings that it does not have. Engine exact has one attention, and is deterministic as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A replay configuration. None, or the default, is "as recorded"."""

    name: str = ""
    """The pass is `replay/<name>`; made of the changes when it is not given."""
    engine: str = "hf"
    """`hf`: the rebuilt transformers model; `vllm`: vLLM on the same weights; `exact`: the same bits in every batch."""
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
    batch_tokens: int | None = None
    """Most tokens of a forward, padding among them; rows of like length go together."""
    padding: str | None = None
    """Side of the padding, left or right; `packed`: rows of like length end to end, without padding; `shared`: so too, and a
    prompt that several rows have runs once."""
    mode: str = "prefill"
    """`prefill`; `decode`: one token at a time through the KV cache; `chunked:N`: N at a time."""
    kv_dtype: str | None = None
    """Of what the KV cache holds: fp8 (e4m3, scale 1, vLLM's default)."""
    threads: int | None = None
    """Threads of a CPU operation."""
    compile: bool = False
    """torch.compile of the backbone."""
    prefix_caching: str | None = None
    """vLLM's, on or off."""
    attention_backend: str | None = None
    """vLLM's, by its own name, such as FLASH_ATTN."""
    tensor_parallel_size: int | None = None
    """vLLM's: GPUs that each layer's weights are divided among; on CPUs processes."""
    gpu_memory_utilization: float | None = None
    """vLLM's: share of a GPU's memory; else the recorded one, or what is free, up to 0.9."""
    max_model_len: int | None = None
    """vLLM's: most tokens of a sequence; else the recorded one, or what the longest sequence needs."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms, with CUBLAS_WORKSPACE_CONFIG=:4096:8 where it is not set."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    routing: str | None = None
    """`recorded`: the routers of a mixture of experts give each token the recorded ids, weights and slot order."""
    adapter: str | None = None
    """Of a model with adapters: `off`, as a reference pass has it; `merged` into the weights, as an engine is given it (engines
    vllm and exact, and quantize, always have it so)."""
    weights_version: int | None = None
    """Score with the weights of this policy version instead of the step's own."""

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ENGINES)
        _one_of("prefix_caching", self.prefix_caching, ("on", "off"))
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("lm_head", self.lm_head, ("fp32",))
        _one_of("logits_dtype", self.logits_dtype, tuple(name for name in DTYPES if name != "tf32"))
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("padding", self.padding, PADDINGS)
        _one_of("routing", self.routing, ROUTINGS)
        _one_of("adapter", self.adapter, ("off", "merged"))
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if not re.fullmatch(r"prefill|decode|chunked:[1-9]\d*", self.mode):
            raise InvalidOption(f"got {self.mode!r}; use prefill, decode or chunked:N", option="mode")
        for name, value in (
            ("batch_size", self.batch_size),
            ("batch_tokens", self.batch_tokens),
            ("threads", self.threads),
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("max_model_len", self.max_model_len),
        ):
            if value is not None and value < 1:
                raise InvalidOption(f"got {value}; use 1 or more", option=name)
        self._check_engine()
        self._check_together()
        if self.temperature is not None and self.temperature <= 0:
            raise InvalidOption(f"got {self.temperature}; use a number above 0", option="temperature")
        for name, share in (("top_p", self.top_p), ("gpu_memory_utilization", self.gpu_memory_utilization)):
            if share is not None and not 0 < share <= 1:
                raise InvalidOption(f"got {share}; use a number above 0 and up to 1", option=name)
        if self.top_k is not None and self.top_k < 1:
            raise InvalidOption(f"got {self.top_k}; use 1 or more", option="top_k")
        if not self.name:
            object.__setattr__(self, "name", self._made_name())

    def _check_engine(self) -> None:
        wrong = [name for name in _NOT_OF[self.engine] if getattr(self, name)]
        if wrong and self.engine == "hf":
            raise InvalidOption(f"is vLLM's; add {option('engine', 'vllm')}", option=wrong[0])
        if wrong:
            others = (*_NOT_OF[self.engine], "name", "engine")
            taken = [field.name.replace("_", "-") for field in fields(self) if field.name not in others]
            whose = "vLLM" if self.engine == "vllm" else f"engine {self.engine}"
            raise InvalidOption(
                f"{whose} has no such setting here; with {option('engine', self.engine)} use {', '.join(taken)}",
                option=wrong[0],
            )
        if self.engine == "exact" and self.dtype == "tf32":
            raise InvalidOption("engine exact has no tf32; use fp64, fp32, bf16 or fp16", option="dtype")

    def _check_together(self) -> None:
        """Refuse changes that exclude each other."""
        prefill = self.mode == "prefill"
        if self.kv_dtype and prefill and self.engine == "hf":
            raise InvalidOption(
                f"a prefill reads no cache; add {option('mode', 'decode')} or {option('mode', 'chunked:N')}",
                option="kv_dtype",
            )
        for name in ("compile", "padding"):
            value = getattr(self, name)
            if value in (True, "packed", "shared") and not prefill:
                raise InvalidOption(
                    f"{name}{'' if value is True else f' {value}'}: works with {option('mode', 'prefill')} alone"
                )
        if self.compile and self.routing:
            raise InvalidOption(
                "routers inside a compiled backbone cannot be forced; replay routing without it", option="compile"
            )
        if self.batch_size is not None and self.batch_tokens is not None:
            raise InvalidOption("bounds a forward, as batch-size does; use one of the two", option="batch_tokens")
        if self.engine == "vllm" and self.batch_tokens is not None and self.mode.startswith("chunked"):
            raise InvalidOption(f"is what mode {self.mode} sets; use one of the two", option="batch_tokens")
        if self.padding == "shared" and self.engine == "exact":
            raise InvalidOption("engine exact runs each row's own prompt; use left, right or packed", option="padding")
        if self.padding == "shared" and self.routing:
            raise InvalidOption(
                "a prompt that runs once cannot take each row's recorded routes; use packed", option="padding"
            )
        if self.padding in ("packed", "shared") and self.attention not in PACKABLE:
            raise InvalidOption(
                f"attention {self.attention}: cannot keep to each row of a {self.padding} forward; use math, flash, efficient "
                f"or cudnn, or pad with {option('padding', 'left')} or right"
            )

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the recording: field -> value."""
        default = Arm.__dataclass_fields__
        return {key: value for key, value in asdict(self).items() if key != "name" and value != default[key].default}

    @property
    def is_heard(self) -> bool:
        """Whether `locate` can listen to what its operators take and give."""
        plain = self.engine == "hf" and self.mode == "prefill" and not self.compile
        in_process = self.prefix_caching != "on" and self.tensor_parallel_size in (None, 1)
        return plain or (self.engine == "vllm" and in_process)

    @property
    def is_identity(self) -> bool:
        """Whether nothing differs from the recording."""
        return not self.changes

    @property
    def has_batch_shape(self) -> bool:
        """Whether it says itself which rows go through the model together."""
        return self.batch_size is not None or self.batch_tokens is not None or self.padding in ("packed", "shared")

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
            "compile": "compile",
            "lm_head": "head-",
            "kv_dtype": "kv-",
            "attention_backend": "",
            "adapter": "adapter-",
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
    words = [part.partition("=") for part in filter(None, (part.strip() for part in text.split(",")))]
    return _arm({key.strip(): value.strip() if equals else None for key, equals, value in words})


def arm_text(changes: Mapping[str, Any]) -> str | None:
    """What an arm changes in the words of `parse_arm`, as a pass's contract has it; None where this release does not know them.

    >>> arm_text({"dtype": "fp16", "batch_size": 1})
    'dtype=fp16,batch-size=1'
    """
    words = {name.replace("_", "-"): str(value).lower() if value is True else value for name, value in changes.items()}
    text = ",".join(f"{name}={value}" for name, value in words.items())
    try:
        return text if parse_arm(text).changes == dict(changes) else None
    except InvalidOption:
        return None


def read_arms(path: str | os.PathLike[str]) -> list[Arm]:
    """The arms of a TOML file: a table each, by the arm's name, with the options' names as keys.

    Raises InvalidOption for a file that holds none.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOption(f"arm file {path}: cannot be read: {error}") from error
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidOption(f'arm file {path}: holds no arms; write a table each, as [half], then dtype = "fp16"')
    arms = []
    for name, table in tables.items():
        try:
            arms.append(_arm({key: str(value).lower() for key, value in table.items()} | {"name": name}))
        except InvalidOption as error:
            raise InvalidOption(f"arm file {path}, [{name}]: {error}") from error
    return arms


def check_distinct(names: Sequence[str]) -> None:
    """Raise InvalidOption where two arms have one name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidOption(
            f"{', '.join(twice)} is named twice; give each arm a name of its own with name=", option="arm"
        )


def _arm(words: Mapping[str, str | None]) -> Arm:
    """The arm of options as they are written; a switch needs no value."""
    kinds = {field.name: str(field.type) for field in fields(Arm)}
    values: dict[str, Any] = {}
    for key, value in words.items():
        name = key.replace("-", "_")
        if name not in kinds or (value is None and kinds[name] != "bool"):
            raise InvalidOption(
                f"got {key if value is None else f'{key}={value}'!r}; write changes as name=value with commas "
                f"between them, as dtype=fp16,batch-size=1; names: "
                f"{', '.join(sorted(known.replace('_', '-') for known in kinds))}",
                option="arm",
            )
        values[name] = _typed(name, value, kinds[name])
    return Arm(**values)


def _typed(name: str, value: str | None, kind: str) -> Any:
    try:
        if kind == "bool":
            return {None: True, "true": True, "false": False}[value]
        return int(value or "") if kind.startswith("int") else float(value or "") if kind.startswith("float") else value
    except (ValueError, KeyError) as error:
        raise InvalidOption(f"{name.replace('_', '-')} cannot be {value!r}", option="arm") from error


def _one_of(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidOption(f"got {value!r}; use {', '.join(choices)}", option=name)
