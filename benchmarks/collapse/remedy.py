"""Remedies to try against a collapse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Switches to change in a collapsed run, and the runs to which this applies."""

    name: str
    kind: str
    """`correction`, `precision` or `schedule`."""
    changes: dict[str, object]
    of: Mapping[str, object] = field(default_factory=dict)
    """Switches that the run must have; a remedy that only restores the healthy twin does not count."""
    arm: str | None = None
    """`tim-trace replay --arm` for the engine with the remedy; "": the trainer itself; None: not supported."""
    instead_of: str | None = None
    """The arm for what the remedy removes; None: the engine as recorded."""

    def applies(self, switches: Mapping[str, object]) -> bool:
        """Return True if the remedy applies to a run with these switches."""
        return all(switches.get(name) == value for name, value in self.of.items())


_BF16 = {"engine_dtype": "bf16"}
REMEDIES = (
    Remedy(name="token TIS, cap 2", kind="correction", changes={"correction": "token_truncate", "correction_cap": 2.0}),
    Remedy(name="token MIS, cap 2", kind="correction", changes={"correction": "token_mask", "correction_cap": 2.0}),
    Remedy(
        name="sequence rejection, cap 2", kind="correction",
        changes={"correction": "sequence_mask", "correction_cap": 2.0},
    ),
    Remedy(
        name="weights: 4 bits for 3", kind="precision", changes={"weight_bits": 4}, of={"weight_bits": 3},
        arm="quantize=int4",
    ),
    Remedy(
        name="weights: 8 bits for 3", kind="precision", changes={"weight_bits": 8}, of={"weight_bits": 3},
        arm="quantize=int8",
    ),
    Remedy(name="KV cache: int4 for int2", kind="precision", changes={"cache": "int4"}, of={"cache": "int2"}),
    Remedy(
        name="KV cache: fp8 for int2", kind="precision", changes={"cache": "fp8"}, of={"cache": "int2"},
        arm="kv-dtype=fp8",
    ),
    Remedy(
        name="KV cache: bf16 for int2", kind="precision", changes={"cache": "bf16"},
        of={"cache": "int2", "engine_dtype": None},
    ),
    Remedy(
        name="engine: fp16 for bf16", kind="precision", changes={"engine_dtype": "fp16"}, of=_BF16, arm="dtype=fp16",
        instead_of="dtype=bf16",
    ),
    Remedy(
        name="engine: float32 for bf16", kind="precision", changes={"engine_dtype": None}, of=_BF16, arm="",
        instead_of="dtype=bf16",
    ),
    Remedy(name="a third of the learning rate", kind="schedule", changes={"rate_factor": 0.3}),
    Remedy(name="cosine to a tenth", kind="schedule", changes={"schedule": "cosine"}),
    Remedy(name="length decay", kind="schedule", changes={"schedule": "length_decay"}),
)  # fmt: skip
