"""What is tried against a collapse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Switches that are changed in a run that fell, and in which runs that is a choice at all."""

    name: str
    kind: str
    """`correction`, `precision` or `schedule`."""
    changes: dict[str, object]
    of: Mapping[str, object] = field(default_factory=dict)
    """Switches that the run must have for it; where the remedy would only be the sound twin it is not one."""
    arm: str | None = None
    """`tim-trace replay --arm` of the engine as the remedy has it; "": the trainer itself; None: replay does not know it."""
    instead_of: str | None = None
    """The arm of what the remedy takes away; None: all that was recorded of the engine."""

    def applies(self, switches: Mapping[str, object]) -> bool:
        """Whether a run with these switches can have it."""
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
