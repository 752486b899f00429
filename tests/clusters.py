"""Real Ray clusters of several raylets on this machine."""

from contextlib import contextmanager

TRIES = 5
"""Ray gives a raylet thirty seconds to start, which a busy machine does not keep."""


@contextmanager
def two_nodes(**options):
    """A cluster and its two nodes, which take an actor each, beside a head that takes none; options are those of a node."""
    made, nodes = _started(options)
    try:
        yield made, nodes
    finally:
        made.shutdown()


def _started(options):
    from ray.cluster_utils import Cluster

    for tries in range(TRIES):
        made = Cluster()
        try:
            made.add_node(num_cpus=0, object_store_memory=10**8)
            nodes = [made.add_node(num_cpus=1, object_store_memory=10**8, **options) for _ in range(2)]
            made.wait_for_nodes()
        except Exception:
            made.shutdown()
            if tries == TRIES - 1:
                raise
        else:
            return made, nodes
    raise AssertionError


def removing(made, node, told):
    """A progress that removes a node at the first part that is done; `told` gets the size of each part."""

    @contextmanager
    def progress(what, total):
        def advance(size):
            told.append(size)
            if len(told) == 1:
                made.remove_node(node, allow_graceful=False)

        yield advance

    return progress
