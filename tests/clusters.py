"""Real Ray clusters of several raylets on this machine."""

from contextlib import contextmanager


@contextmanager
def two_nodes():
    """A cluster and its two nodes, which take an actor each, beside a head that takes none."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    nodes = [made.add_node(num_cpus=1, object_store_memory=10**8) for _ in range(2)]
    made.wait_for_nodes()
    try:
        yield made, nodes
    finally:
        made.shutdown()
