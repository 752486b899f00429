"""An fsspec file system through which DuckDB and Arrow read the finished files in traces; every byte is verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from fsspec import AbstractFileSystem

from ..schemas.errors import DamagedTrace, QueryFailed
from .verified_file import FileCursor, VerifiedFile

PROTOCOL = "tim"


class TraceFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system of registered files, such as tim://0/scores/12, and of patterns that expand to selected files."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, VerifiedFile] = {}
        self._contents: dict[str, bytes] = {}
        self._chosen: dict[str, Sequence[str]] = {}
        self.num_asked: Counter[str] = Counter()
        """Pattern -> number of times that DuckDB or Arrow expanded it."""

    def add(self, name: str, file: VerifiedFile) -> str:
        """Register a file under a name, and return its URL."""
        self._files[name] = file
        return self.url(name)

    def add_content(self, name: str, content: bytes) -> None:
        """Register an in-memory file under a name."""
        self._contents[name] = content

    def choose(self, pattern: str, names: Sequence[str]) -> None:
        """Set the files that a pattern expands to."""
        self._chosen[pattern] = names

    @staticmethod
    def url(name: str) -> str:
        """Return the URL of a file or a pattern."""
        return f"{PROTOCOL}://{name}"

    @property
    def error(self) -> DamagedTrace | QueryFailed | None:
        """Return the error of the first failed read, or None."""
        return next((file.error for file in self._files.values() if file.error is not None), None)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name in self._contents:
            size = len(self._contents[name])
        elif name in self._files:
            size = self._files[name].shown_bytes
        else:
            raise FileNotFoundError(path)
        return {"name": name, "size": size, "type": "file", "mtime": 0.0}

    def exists(self, path: str, **_: Any) -> bool:
        name = self._strip_protocol(path)
        return name in self._files or name in self._contents

    def glob(self, path: str, **_: Any) -> list[str]:
        pattern = self._strip_protocol(path)
        if pattern in self._chosen:
            self.num_asked[pattern] += 1
            return list(self._chosen[pattern])
        return [path] if self.exists(path) else []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = [self.info(path)]
        return found if detail else [entry["name"] for entry in found]

    def modified(self, path: str) -> Any:
        from datetime import UTC, datetime

        return datetime.fromtimestamp(0.0, UTC)  # finished files in a trace never change

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = self._strip_protocol(path)
        return BytesIO(self._contents[name]) if name in self._contents else FileCursor(self._files[name])
