"""locate/<id>.json: what was asked, of what, with what, and what was found apart from operators and patches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import msgspec

from ...schemas.checksums import SealedFile
from ...schemas.documents import read_document, to_document
from ...schemas.errors import DamagedTrace, NewerTrace
from .results import Divergence, LocatedSequence, Router, WeightDifference

FORMAT = 1
"""Of the header and the tables beside it."""
_WHAT = "a result of locate"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateQuestion:
    """What `locate` was asked. The same question has the same id, and its newest result is kept."""

    step: int
    arm: str | None
    against: str
    sequences: str
    layers: str | None
    patch: str
    model_factory: str | None
    against_factory: str | None
    weights_from: str | None
    operators: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeader:
    """One result of `locate`, less its rows."""

    format: int
    id: str
    """Of its question; names its files."""
    run_id: str
    """Of the trace."""
    question: LocateQuestion
    made_at: str
    """ISO 8601 in UTC."""
    made_by: str
    """Version of tim-trace."""
    versions: dict[str, str]
    """Libraries that can change a logprob -> version."""
    device: str
    """`cpu` or `cuda`."""
    policy_version: int
    """Of the recorded weights."""
    a: str
    """Name of the arm."""
    b: str
    chosen: str
    """How the sequences were chosen."""
    sequences: tuple[LocatedSequence, ...]
    num_tokens: int
    mean_abs_d: float
    """nats"""
    max_abs_d: float
    """nats"""
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    unseen: tuple[str, ...]
    engines: tuple[str, ...]
    """The sides that vLLM ran."""
    first: Divergence | None
    unjudged: dict[str, str] = field(default_factory=dict)
    """Operators, and what else could not be judged -> why."""
    files: dict[str, SealedFile]
    """Path in the trace -> what was written there; of operators, and of patches."""

    def to_json(self) -> str:
        return to_document(asdict(self))


def parse_header(content: bytes, where: str) -> ResultHeader:
    """Read locate/<id>.json; fields that this build does not know are passed over. Raises DamagedTrace and NewerTrace."""
    values = read_document(content, where, _WHAT, needs_checksum=True)
    if isinstance(made := values.get("format"), int) and made > FORMAT:
        raise NewerTrace(f"{where}: format {made} of a later release; this one reads up to {FORMAT}")
    try:
        # JSON has no NaN and no infinities: they are texts there.
        return msgspec.convert(values, ResultHeader, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {_WHAT} ({str(error).splitlines()[0]}); run locate again") from error
