"""Writing what is imported: here an error ends the command, since nobody's training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.checksums import SealedFile
from ...schemas.errors import ImportFailed
from ...schemas.writer_state import FAILED
from ..writer import TraceWriter


class ImportWriter(TraceWriter):
    """A trace writer whose errors are raised and not told.

    It writes to a folder that becomes a trace, or a part of one, as a whole at the end: of a process that dies before, the
    folder is removed. So nothing is journaled, and the state is saved at both ends. Which libraries made the numbers is not known.
    """

    failure: BaseException | None = None
    """What ended the writing."""

    def __init__(self, folder: Path):
        super().__init__(folder, journals=False, versions={})

    def account(self, files: Mapping[str, SealedFile] | None = None, **_: Any) -> None:
        """Account for files; the state is saved at the end."""
        super().account(files, saves=False)

    def _fail(self, error: BaseException) -> None:
        """Stop writing; on the writing thread. The folder is about to be removed, so that nothing is marked in it."""
        if not self.is_open:
            return
        self.failure = error
        self.state.state, self.state.error = FAILED, f"{type(error).__name__}: {error}"
        self.segments.abandon()

    def _is_whole(self) -> bool:
        return self.state.state != FAILED

    def check(self, where: str) -> None:
        """Raise ImportFailed when writing has ended."""
        if self.state.state == FAILED:
            reason = " ".join(str(self.state.error).split())
            raise ImportFailed(f"{where}: could not be written ({reason})") from self.failure
