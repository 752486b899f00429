"""Write an imported trace. Unlike in a recording, an error ends the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.checksums import SealedFile
from ...schemas.errors import ImportFailed
from ...schemas.writer_state import FAILED
from ..writer import TraceWriter


class ImportWriter(TraceWriter):
    """A trace writer that raises errors instead of reporting them on stderr.

    The output folder becomes a trace, or part of a trace, only at the end, and is removed if the process dies. Therefore
    nothing is journaled, and the state is saved only at the start and the end. Library versions are not recorded.
    """

    failure: BaseException | None = None
    """The error that ended the writing."""

    def __init__(self, folder: Path):
        super().__init__(folder, journals=False, versions={})

    def account(self, files: Mapping[str, SealedFile] | None = None, **_: Any) -> None:
        """Add files to the writer's state without saving the state, which is saved at the end."""
        super().account(files, saves=False)

    def _fail(self, error: BaseException) -> None:
        """Stop writing after an error, on the writing thread; the folder is removed, so it is not marked as failed."""
        if not self.is_open:
            return
        self.failure = error
        self.state.state, self.state.error = FAILED, f"{type(error).__name__}: {error}"
        self.segments.abandon()

    def _is_whole(self) -> bool:
        return self.state.state != FAILED

    def check(self, where: str) -> None:
        """Raise ImportFailed if writing has failed."""
        if self.state.state == FAILED:
            reason = " ".join(str(self.state.error).split())
            raise ImportFailed(f"{where}: could not be written ({reason})") from self.failure
