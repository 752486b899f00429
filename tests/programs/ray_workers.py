"""Record from a worker of Ray; `ray_workers.py ARGUMENTS`: those of ray.init as JSON, `job_config` as its runtime environment."""

import json
import os
import sys

import ray
from ray.job_config import JobConfig

arguments = json.loads(sys.argv[1])
if "job_config" in arguments:
    arguments["job_config"] = JobConfig(runtime_env=arguments["job_config"])
ray.init(
    address="local", num_cpus=1, object_store_memory=10**8, include_dashboard=False, log_to_driver=False, **arguments
)


@ray.remote
def train():
    from tim_trace.tracer.hooks.session import Order, Session

    order = Order.from_environment()
    if order is not None:
        session = Session(order)
        session.recorder.add_sequences(step=1, response_ids=[[1, 2]])
        session.close()
    return [os.environ.get("PYTHONPATH", ""), os.environ.get("MINE")]


print(json.dumps(ray.get(train.remote())))
