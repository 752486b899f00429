"""Writing what is imported: here an error ends the command, since nobody's training goes on."""

from __future__ import annotations

from ...schemas.errors import ImportFailed
from ...schemas.writer_state import FAILED
from ..writer import TraceWriter


class ImportWriter(TraceWriter):
    """A trace writer whose errors are raised and not told."""

    failure: BaseException | None = None
    """What ended the writing."""

    def _fail(self, error: BaseException) -> None:
        """Stop writing; on the writing thread. The folder is about to be removed, so that nothing is marked in it."""
        if not self.is_open:
            return
        self.failure = error
        self.state.state, self.state.error = FAILED, f"{type(error).__name__}: {error}"
        self.segments.abandon()

    def check(self, where: str) -> None:
        """Raise ImportFailed when writing has ended."""
        if self.state.state == FAILED:
            reason = " ".join(str(self.state.error).split())
            raise ImportFailed(f"{where}: could not be written ({reason})") from self.failure
