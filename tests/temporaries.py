"""What a function of torch's tensors takes beside them."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_BYTES = 64 << 20
"""What recording may take beside the tensors that it looks at."""


class _Storages(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs))
        for tensor in given:
            if hasattr(tensor, "untyped_storage"):
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else None
            if storage is not None and storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, num_bytes):
        self._now -= num_bytes


def most_beside(function, *args, **kwargs):
    """The most bytes of tensors that were made at one time while a function ran."""
    with _Storages() as storages:
        function(*args, **kwargs)
    return storages.peak
