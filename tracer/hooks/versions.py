"""Tested versions of the hooked libraries, and the sentence reported for other versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TESTED: Mapping[str, Sequence[str]] = {
    "trl": ("0.24", "1.0", "1.8", "1.12", "1.16"),
    "verl": ("0.9",),
    "vllm": ("0.17", "0.27", "0.32"),
}
"""Library -> its tested releases as major.minor, the same that `make matrix` runs."""


def untested(library: str, version: str) -> bool:
    """Return True if the given version of a library belongs to an untested release."""
    return ".".join(version.split("+")[0].split(".")[:2]) not in TESTED[library]


def tested_releases(library: str) -> str:
    """Return a library's tested releases as text for use in a sentence."""
    return ", ".join(f"{release}.x" for release in TESTED[library])


def version_sentence(library: str, version: str, missing: Mapping[str, str]) -> str | None:
    """Return a sentence if a library's release is untested or lacks a hooked function, else None.

    `missing` maps each missing function to the data that would be recorded from it.
    """
    if not missing and not untested(library, version):
        return None
    lost = "; ".join(f"{what} ({name} was not found)" for name, what in missing.items())
    found = f"not recorded: {lost}" if missing else "all functions that recording needs exist, but were not tested"
    return f"{library} {version} is not a tested version (tested: {tested_releases(library)}), training is not affected; {found}"
