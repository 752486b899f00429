"""verl's rows of `make matrix`: a release and a program of it, and what a short run on a CPU leaves in the trace.

tests/verl_runs.py makes the environment of a release (`verl_environment`: packages, edits of the installed verl) and runs the
program (`verl_run(*row.settings, main=row.main, release=row.release, head_rows=35)`); two steps take 3 to 6 minutes on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("current", "rollout", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlRow:
    """One release of verl, and one of its trainers."""

    release: str
    main: str = "verl.trainer.main_ppo"
    """The module that is run with `python -m`."""
    settings: tuple[str, ...] = ()
    """Beside those of every run, dynamic batches among them."""
    recorded: tuple[str, ...] = ALL
    """Passes with logprobs."""
    is_replayed: bool = True
    """Whether `tim-trace replay RUN --steps 1:2` gives back every bit of `train`."""
    missing: str = ""
    """What the trace does not hold, and what to do."""


_PACKED = "actor_rollout_ref.model.use_remove_padding=True"

ROWS = (
    VerlRow(release="0.9.1", settings=(_PACKED,)),
    VerlRow(release="0.9.1", settings=("trainer.use_v1=False",)),
    VerlRow(release="0.8.0", main="verl.trainer.main_ppo_sync", settings=(_PACKED,)),
    VerlRow(release="0.8.0"),
    VerlRow(
        release="0.7.1",
        settings=(
            "trainer.use_legacy_worker_impl=disable",
            "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        ),
        is_replayed=False,
        missing="with float32 parameters, which these runs have, verl 0.7 computes in bfloat16 all the same: 60 % of the bits come back",
    ),
    VerlRow(
        release="0.7.1",
        recorded=("rollout", "train"),
        is_replayed=False,
        missing="current, weights and forwards; trainer.use_legacy_worker_impl=disable has them",
    ),
)

BY_DUMPS = ("0.4.1", "0.5.0", "0.6.1")
"""Releases of which metrics alone are recorded: trainer.rollout_data_dir=DIR, then tim-trace import verl DIR -o RUN."""
