"""Which versions of the hooked libraries recording was tested with, and what to say of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TESTED: Mapping[str, Sequence[str]] = {
    "trl": ("0.24", "1.0", "1.8", "1.12", "1.16"),
    "verl": ("0.9",),
    "vllm": ("0.17", "0.27", "0.32"),
}
"""Library -> its tested releases, major.minor: those of `make matrix`."""


def untested(library: str, version: str) -> bool:
    """Whether this release is none of the tested ones."""
    return ".".join(version.split("+")[0].split(".")[:2]) not in TESTED[library]


def tested_releases(library: str) -> str:
    """Return the tested releases as a sentence names them."""
    return ", ".join(f"{release}.x" for release in TESTED[library])


def version_sentence(library: str, version: str, missing: Mapping[str, str]) -> str | None:
    """One sentence on a release that was not tested or lacks a hook point; None when there is nothing to say.

    `missing` maps each function that was not found to what it would have given.
    """
    if not missing and not untested(library, version):
        return None
    lost = "; ".join(f"{what} ({name} was not found)" for name, what in missing.items())
    found = f"not recorded: {lost}" if missing else "every function that recording needs was found, unverified"
    return f"{library} {version} is not a tested version (tested: {tested_releases(library)}), training is not affected; {found}"
