"""Router choices of a dump, as the trace keeps them."""

from __future__ import annotations

import numpy as np

from ...schemas.errors import ImportFailed
from ..routing import NOT_ROUTED

_MOST = np.iinfo(np.int16).max


def routed(found: np.ndarray, num_tokens: int, where: str) -> np.ndarray:
    """[num_tokens, L, S] int16 of the choices of a sequence's first tokens, [N, L, S]; the others have none.

    A token whose slots hold one expert all is padding: a router gives no expert twice. Raises ImportFailed.
    """
    if found.dtype.kind not in "iu" or (found.size and not NOT_ROUTED <= found.min() <= found.max() <= _MOST):
        raise ImportFailed(f"{where}: its router choices are {found.dtype} beyond -1 to {_MOST}, and so no experts")
    ids = np.full((num_tokens, *found.shape[1:]), NOT_ROUTED, np.int16)
    ids[: len(found)] = found
    if found.shape[2] > 1:
        ids[(ids == ids[:, :, :1]).all(axis=(1, 2))] = NOT_ROUTED
    return ids
