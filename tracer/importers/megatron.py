"""Import reference values from Megatron-LM's functional inference tests (golden_values_*.json).

Field names are from examples/inference/{utils,advanced/gpt_static_inference}.py. Setting names are from the
folders of tests/functional_tests/test_cases (NVIDIA/Megatron-LM, d98e8a64).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .columns import RowBatch
from .fields import Fields
from .format import DumpFolder, Format, Reading, read_rows
from .responses import STEP
from .shared_rows import MODEL_SIZE, NOT_SETTINGS, PROMPT, UNKNOWN, named_settings, pass_names
from .textfiles import TIMES_AS_JSON, parsed, whole_content

_FILE = r"(?:[^/]*__)?golden_values[^/]*\.json"


def _case(path: str) -> tuple[list[str], str, str]:
    """Return the folders, case and environment (such as `dev_dgx_h100`) named in a path.

    Paths have the form `<family>/<case>/golden_values_<env>.json`. A file that was copied out of its folders may have
    `__` instead of each `/`.
    """
    *folders, case, file = ["", *re.split(r"__|/", path)]
    return folders, case, file.removesuffix(".json").removeprefix("golden_values").strip("_")


def _passes(folder: DumpFolder) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each file's pass name and settings, both parsed from its path."""
    cases = {name: _case(f"{folder.root}/{name}") for name in folder.matching(_FILE)}
    shared = set.intersection(*(set(env.split("_")) for _, _, env in cases.values())) if cases else set()
    paths = []
    for folders, case, env in cases.values():
        said = "_".join(word for word in case.split("_") if word not in NOT_SETTINGS)
        paths.append("/".join([*folders, ".".join([said, *(word for word in env.split("_") if word not in shared)])]))
    return {
        file: (name, {"engine": "megatron-lm", "device": env.rpartition("_")[2], **named_settings(case)})
        for (file, (_, case, env)), name in zip(cases.items(), pass_names(paths), strict=True)
    }


def _requests(path: Path) -> list[Mapping[str, Any]]:
    content = whole_content(path, TIMES_AS_JSON)
    if not content.strip():  # the Megatron-LM repository has some empty files
        return []
    found = parsed(content, str(path), "a golden file contains one object per request")
    if not isinstance(found, Mapping):
        return []
    requests = [found] if "generated_tokens" in found else found.values()
    return [one for one in requests if isinstance(one, Mapping) and "generated_tokens" in one]


def _is_in(folder: DumpFolder) -> bool:
    for name in folder.matching(_FILE):
        with suppress(ImportFailed):
            if _requests(folder.path(name)):
                return True
    return False


def _read(reading: Reading) -> Iterator[RowBatch]:
    def records(path: Path, _first: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        requests = _requests(path)
        numbered = enumerate(requests, start=1)
        with_values = [(number, one) for number, one in numbered if one.get("logprobs") is not None]
        if not with_values:
            reading.without_values.append(str(path))
        yield from with_values

    return read_rows(reading, _rows, records=records, unit="request")


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    ids, logprobs = fields.ids("response_ids"), fields.values("rollout_logprobs")
    if ids is None or logprobs is None or len(logprobs) < len(ids):
        found, tokens = (0 if each is None else len(each) for each in (logprobs, ids))
        raise ImportFailed(f"{fields.where}: {found} logprobs for {tokens} tokens, expected at least one per token")
    num_prompt = len(logprobs) - len(ids)
    file, text = name.rpartition(":")[0], fields.text("prompt")
    folders, case, _ = _case(file)
    model = [*folders[-1:], *filter(MODEL_SIZE.fullmatch, case.split("_"))]
    of = file if text is None else sha256(text.encode(errors="replace")).hexdigest()[:8]
    yield {
        "step": STEP,
        PROMPT: f"{'-'.join(filter(None, model)).lower()}/{of}/{num_prompt}",
        "response_ids": np.concatenate([np.full(num_prompt, UNKNOWN, np.int32), ids]),
        "rollout_logprobs": logprobs,
    }


MEGATRON = Format(
    name="megatron-lm",
    writes="the inference scripts of its functional tests",
    files="<family>/<case>/golden_values_*.json",
    columns={"prompt": ("input_prompt",), "response_ids": ("generated_tokens",), "rollout_logprobs": ("logprobs",)},
    alignment="each file is a pass, named after its folder and platform, and its contract holds the settings found "
    "in that name. logprobs covers the prompt (except its first token) and generated_tokens. The prompt's tokens are "
    "imported as the first response tokens, with id -1 because the files do not contain their ids",
    pattern=_FILE,
    recognises=_is_in,
    passes=_passes,
    read=_read,
    lacks={"train": "the files have only the engine's logprobs"},
)
