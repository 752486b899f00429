"""Which versions of the hooked libraries recording was tested with, and what to say of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TESTED: Mapping[str, Sequence[str]] = {"trl": ("1.16",), "verl": ("0.9",), "vllm": ("0.32",)}
"""Library -> its tested releases, major.minor."""


def untested(library: str, version: str) -> bool:
    """Whether this release is none of the tested ones."""
    return ".".join(version.split("+")[0].split(".")[:2]) not in TESTED[library]


def version_sentence(library: str, version: str, missing: Mapping[str, str]) -> str | None:
    """One sentence on a release that was not tested or lacks a hook point; None when there is nothing to say.

    `missing` maps each function that was not found to what it would have given.
    """
    if not missing and not untested(library, version):
        return None
    tested = " and ".join(TESTED[library])
    lost = "; ".join(f"{what} ({name} was not found)" for name, what in missing.items())
    found = f"not recorded: {lost}" if missing else "every function that recording needs was found, unverified"
    return f"{library} {version} is not a tested version (tested: {tested}.x), training is not affected; {found}"
