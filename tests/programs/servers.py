"""A vLLM server on this CPU, in a process of its own, and TRL's client of it: NCCL is what a CPU lacks, so files carry weights."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
TEMPLATE = "{% for message in messages %}{{ message.content }}={% endfor %}"
MODULE = "vllm.entrypoints.openai.api_server"


def settings(model, port):
    return [
        "--model", str(model), "--port", str(port), "--max-model-len", "64", "--dtype", "float32", "--enforce-eager",
        "--seed", "0", "--max-num-seqs", "16", "--distributed-executor-backend", "uni", "--uvicorn-log-level", "error",
    ]  # fmt: skip


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _end_with_parent():
    """Have the kernel end this process with the one that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def server(model):
    """The address of a server that nobody records, whatever becomes of its caller."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "TIM_TRACE_RECORD"}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [environment.get("PYTHONPATH")])]),
    }
    more = [
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "-1",
        "--worker-extension-cls",
        "reloads.Reloads",
    ]
    command = [sys.executable, "-m", MODULE, *settings(model, port), *more]
    process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def carry_weights_in_files(folder):
    """Have TRL's client give weights to its server in a file."""
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    path = f"{folder}.safetensors"

    def update_named_params(client, metadata, named_params):
        save_file({name: tensor.detach().clone() for name, tensor in named_params}, path)
        client.session.post(
            f"{client.base_url}/collective_rpc", json={"method": "reload_file", "args": [path]}
        ).raise_for_status()

    VLLMClient.init_communicator = lambda client, device=0: None
    VLLMClient.update_named_params = update_named_params
