"""The finished files of traces as a file system that DuckDB and Arrow read: names without patterns, every byte verified."""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem

from ..schemas.errors import DamagedTrace, QueryFailed
from .verified_file import FileCursor, VerifiedFile

PROTOCOL = "tim"


class TraceFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files by names that are given here, such as tim://0/scores/12."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, VerifiedFile] = {}

    def add(self, name: str, file: VerifiedFile) -> str:
        """Give a file a name, and return its URL."""
        self._files[name] = file
        return f"{PROTOCOL}://{name}"

    @property
    def names(self) -> list[str]:
        """Every name that was given."""
        return list(self._files)

    @property
    def error(self) -> DamagedTrace | QueryFailed | None:
        """What the first read found that met damage; None while all were right."""
        return next((file.error for file in self._files.values() if file.error is not None), None)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self._files:
            raise FileNotFoundError(path)
        return {"name": name, "size": self._files[name].shown_bytes, "type": "file", "mtime": 0.0}

    def exists(self, path: str, **_: Any) -> bool:
        return self._strip_protocol(path) in self._files

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path] if self.exists(path) else []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = [self.info(path)]
        return found if detail else [entry["name"] for entry in found]

    def modified(self, path: str) -> Any:
        from datetime import UTC, datetime

        return datetime.fromtimestamp(0.0, UTC)  # no file of a trace changes

    def _open(self, path: str, mode: str = "rb", **_: Any) -> FileCursor:
        return FileCursor(self._files[self.info(path)["name"]])
