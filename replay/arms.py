from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from ..schemas.errors import InvalidOption, option
from .arm_option import (
    ENGINES,
    EXACT,
    FACTORY,
    GRADIENT,
    HF,
    LOCATE,
    VLLM,
    ArmOption,
    Clash,
    arm_option,
    check_clashes,
)  # fmt: skip
from .backends.kernels import KERNELS

DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PACKABLE = tuple(name for name, kernel in KERNELS.items() if kernel.backend is not None)
"""Attention kernels that support `packed` padding."""
AS_RECORDED = "as-recorded"
_ANY = (HF, VLLM, EXACT, LOCATE, FACTORY, GRADIENT)
_TORCH = (HF, EXACT, LOCATE, FACTORY, GRADIENT)
_CACHED = ("decode", "chunked")
_OUTSIDE_OPERATORS = {"weights_version", "quantize", "adapter", "temperature", "top_p", "top_k"}
"""Options that change an operator's weights, or what is computed from the logits, but no operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Settings to change in a replay. An option at its default keeps the recorded setting."""

    engine: str = arm_option(
        "Replay engine: the rebuilt transformers model, vLLM with the same weights, or batch-invariant layers.",
        default=HF, values=ENGINES, users=(HF, VLLM, EXACT, LOCATE, FACTORY), label="",
    )  # fmt: skip
    dtype: str | None = arm_option(
        "Dtype of weights and activations. Turns autocast off. fp64 also applies to norms, softmax and logits.",
        values=tuple(DTYPES), users=_ANY, refused={VLLM: ("fp64", "tf32"), EXACT: ("tf32",)}, label="",
    )  # fmt: skip
    quantize: str | None = arm_option(
        "Round linear-layer and expert weights (not the head or routers) using one symmetric scale per 128 inputs. "
        "Matrix products still run in the arm's dtype.",
        values=("int8", "int4", "fp8"), users=_TORCH, label="",
    )  # fmt: skip
    lm_head: str | None = arm_option(
        "Compute the head projection in float32.", values=("fp32",), users=(HF, EXACT, LOCATE, GRADIENT), label="head-"
    )
    logits_dtype: str | None = arm_option(
        "Dtype for the logits and everything computed from them.",
        values=tuple(name for name in DTYPES if name != "tf32"), users=(HF, LOCATE, FACTORY, GRADIENT),
    )  # fmt: skip
    attention: str | None = arm_option(
        "Attention: eager, flex, or a scaled_dot_product_attention kernel.",
        values=tuple(KERNELS), users=(HF, LOCATE, GRADIENT), label="",
    )  # fmt: skip
    batch_size: int | None = arm_option(
        "Rows per forward pass, in the recorded order and padded to the recorded width.", users=_ANY, metavar="N"
    )
    batch_tokens: int | None = arm_option(
        "Maximum tokens per forward pass, including padding. Rows are grouped by length.",
        users=_ANY, metavar="N",
        clashes=(
            Clash(other="batch_size", why="both options limit the size of a forward pass"),
            Clash(other="mode", others=("chunked",), engine=VLLM, why="chunked mode already sets vLLM's token limit"),
        ),
    )  # fmt: skip
    padding: str | None = arm_option(
        "Padding side, or packed (rows are concatenated, without padding).",
        values=("left", "right", "packed"), users=_TORCH,
        refused={FACTORY: ("packed",)},
        clashes=(
            Clash(values=("packed",), other="mode", others=_CACHED, why="packed rows have no KV cache"),
            Clash(
                values=("packed",), other="attention",
                others=tuple(name for name in KERNELS if name not in PACKABLE),
                why="this attention kernel cannot separate packed rows",
            ),
        ),
    )  # fmt: skip
    mode: str = arm_option(
        "Run one forward pass (prefill), or feed in the response 1 (decode) or N tokens at a time, using the KV cache.",
        default="prefill", values=("prefill", "decode", "chunked:N"), users=ENGINES, label="",
    )  # fmt: skip
    preempt: int | None = arm_option(
        "Preempt all running requests after every N steps that generate tokens. vLLM then recomputes their KV cache.",
        users=(VLLM,), metavar="N",
        clashes=(Clash(other="mode", others=("prefill", "chunked"), why="only decoding generates several tokens"),),
    )  # fmt: skip
    kv_dtype: str | None = arm_option(
        "Round keys and values in the KV cache to e4m3 with scale 1 (vLLM's default scale).",
        values=("fp8",), users=(HF, VLLM, LOCATE), label="kv-",
        clashes=(Clash(other="mode", others=("prefill",), engine=HF, why="a prefill does not read the cache"),),
    )  # fmt: skip
    threads: int | None = arm_option("CPU threads per operation.", users=_TORCH, metavar="N")
    compile: bool = arm_option(
        "Run the backbone through torch.compile.", default=False, users=(HF, FACTORY), label="compile",
        clashes=(
            Clash(other="mode", others=_CACHED, why="only a prefill can be compiled"),
            Clash(other="routing", why="router choices cannot be forced inside a compiled backbone"),
        ),
    )  # fmt: skip
    prefix_caching: str | None = arm_option(
        "Turn vLLM's prefix cache on or off.", values=("on", "off"), users=(VLLM, LOCATE), refused={LOCATE: ("on",)}
    )
    attention_backend: str | None = arm_option(
        "vLLM's attention backend, such as FLASH_ATTN.", users=(VLLM, LOCATE), metavar="NAME", label=""
    )
    tensor_parallel_size: int | None = arm_option(
        "Number of GPUs (or CPU processes) that vLLM splits each layer across.", users=(VLLM, LOCATE), metavar="N"
    )
    gpu_memory_utilization: float | None = arm_option(
        "Fraction of GPU memory for vLLM.  [default: as recorded, or the free fraction, up to 0.9]",
        users=(VLLM, LOCATE), metavar="SHARE", most=1,
    )  # fmt: skip
    max_model_len: int | None = arm_option(
        "vLLM's maximum tokens per sequence.  [default: as recorded, or enough for the longest sequence]",
        users=(VLLM, LOCATE), metavar="N",
    )  # fmt: skip
    deterministic: bool = arm_option(
        "Use only deterministic algorithms. Sets CUBLAS_WORKSPACE_CONFIG=:4096:8 if unset.",
        default=False, users=(HF, LOCATE, FACTORY, GRADIENT), label="deterministic",
    )  # fmt: skip
    temperature: float | None = arm_option("Divide the logits by T.", users=_ANY, metavar="T", most=inf)
    top_p: float | None = arm_option(
        "Keep the smallest set of most probable tokens whose total probability reaches P.",
        users=(HF, VLLM, LOCATE, FACTORY),
        metavar="P",
        most=1,
    )
    top_k: int | None = arm_option("Keep the K most probable tokens.", users=(HF, VLLM, LOCATE, FACTORY), metavar="K")
    routing: str | None = arm_option(
        "Force each token's recorded experts, with their order and weights. Requires a trace recorded with --routing.",
        values=("recorded",), users=(HF, LOCATE, FACTORY),
    )  # fmt: skip
    adapter: str | None = arm_option(
        "Turn adapters off (like a reference model) or merge them into the weights (like an engine).",
        values=("off", "merged"), users=(HF, VLLM, EXACT, LOCATE, FACTORY), label="adapter-",
    )  # fmt: skip
    weights_version: int | None = arm_option(
        "Score with this policy version's weights.", users=_ANY, metavar="N", least=0
    )
    name: str = arm_option(
        "Arm name. Scores become pass replay/NAME.  [default: generated from the changes]",
        default="", users=_ANY, metavar="NAME",
    )  # fmt: skip

    def __post_init__(self) -> None:
        options = options_of(type(self))
        for name, described in options.items():
            described.check(name, getattr(self, name))
        self._check_engine()
        check_clashes(options, {name: getattr(self, name) for name in options})
        if not self.name:
            words = [options[name].made_name(name, value) for name, value in self.changes.items()]
            object.__setattr__(self, "name", "+".join(words) or AS_RECORDED)

    def _check_engine(self) -> None:
        for name in self.lacking(self.engine):
            described, value = options_of(type(self))[name], getattr(self, name)
            whose = "vLLM" if self.engine == VLLM else f"engine {self.engine}"
            if self.engine in described.users:
                why = f"{whose} does not support {value}; use {', '.join(described.values_of(self.engine))}"
            elif self.engine == HF:
                why = f"works only with vLLM; add {option('engine', VLLM)}"
            else:
                supported = ", ".join(names_for(self.engine))
                why = f"{whose} does not support this option; with {option('engine', self.engine)} use {supported}"
            raise InvalidOption(why, option=name)

    def lacking(self, user: str) -> list[str]:
        """Return the changed options that `user` (an engine, LOCATE, ...) does not support."""
        options = options_of(type(self))
        return [name for name, value in self.changes.items() if not options[name].works(user, value)]

    @property
    def changes(self) -> dict[str, Any]:
        default = type(self).__dataclass_fields__
        return {key: value for key, value in asdict(self).items() if key != "name" and value != default[key].default}

    @property
    def unheard(self) -> list[str]:
        """Changed options that `locate` does not support. With vLLM, `locate` supports every mode."""
        return [name for name in self.lacking(LOCATE) if (name, self.engine) != ("mode", VLLM)]

    @property
    def is_heard(self) -> bool:
        """True if `locate` can observe the changed operators: they run in this process and round their results."""
        is_observed = self.engine != EXACT and not self.unheard and self.tensor_parallel_size in (None, 1)
        return is_observed and not self.changes.keys() <= _OUTSIDE_OPERATORS

    @property
    def is_identity(self) -> bool:
        return not self.changes

    @property
    def has_batch_shape(self) -> bool:
        return self.batch_size is not None or self.batch_tokens is not None or self.padding == "packed"

    @property
    def keeps_batches(self) -> bool:
        """True if rows run in the recorded batches."""
        return self.engine == HF and not self.has_batch_shape

    @property
    def cached_tokens(self) -> int | None:
        """Response tokens per forward pass through the KV cache, or None for a single pass without the cache."""
        if self.mode == "prefill":
            return None
        return 1 if self.mode == "decode" else int(self.mode.partition(":")[2])


def options_of(kind: type) -> dict[str, ArmOption]:
    return {field.name: field.metadata["option"] for field in fields(kind)}


OPTIONS = options_of(Arm)


def names_for(user: str) -> list[str]:
    return [
        name.replace("_", "-")
        for name, described in OPTIONS.items()
        if user in described.users and name not in ("engine", "name")
    ]


def parse_arm(text: str, kind: type[Arm] = Arm) -> Arm:
    """Parse an arm such as `dtype=fp16,attention=eager`. Add `name=...` to name it. Raises InvalidOption.

    >>> parse_arm("dtype=fp16,batch-size=1").name
    'fp16+batch-size-1'
    """
    words = [part.partition("=") for part in filter(None, (part.strip() for part in text.split(",")))]
    kinds = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for word, equals, given in words:
        key, value = word.strip(), given.strip() if equals else None
        name = key.replace("-", "_")
        if name not in kinds or (value is None and kinds[name] != "bool"):
            raise InvalidOption(
                f"got {key if value is None else f'{key}={value}'!r}; write comma-separated name=value changes such as "
                f"dtype=fp16,batch-size=1. Valid names: "
                f"{', '.join(sorted(known.replace('_', '-') for known in kinds))}",
                option="arm",
            )
        values[name] = _typed(name, value, kinds[name])
    return kind(**values)


def arm_text(changes: Mapping[str, Any]) -> str | None:
    """Return the text that `parse_arm` parses into these changes, or None if this release does not know one of them.

    >>> arm_text({"dtype": "fp16", "batch_size": 1})
    'dtype=fp16,batch-size=1'
    """
    words = {name.replace("_", "-"): str(value).lower() if value is True else value for name, value in changes.items()}
    text = ",".join(f"{name}={value}" for name, value in words.items())
    try:
        return text if parse_arm(text).changes == dict(changes) else None
    except InvalidOption:
        return None


def check_distinct(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidOption(
            f"two arms are named {', '.join(twice)}; give each arm a different name with name=", option="arm"
        )


def _typed(name: str, value: str | None, kind: str) -> Any:
    try:
        if kind == "bool":
            return {None: True, "true": True, "false": False}[value]
        return int(value or "") if kind.startswith("int") else float(value or "") if kind.startswith("float") else value
    except (ValueError, KeyError) as error:
        raise InvalidOption(f"{name.replace('_', '-')} cannot be {value!r}", option="arm") from error
