"""Run vLLM's server as `vllm serve` does, ask it over HTTP as clients do, and end it by Ctrl-C. Nothing here knows of tim-trace."""

import argparse
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import requests
import servers
import tiny

PROMPT = [3, 12, 4, 13]


def ask(url, path, **settings):
    given = {"model": "tiny", "seed": 1, "max_tokens": 5, "temperature": 0.7, **settings}
    with requests.post(url + path, json=given, stream=bool(settings.get("stream"))) as response:
        if not settings.get("stream"):
            return response.json()
        lines = [line.decode().removeprefix("data: ") for line in response.iter_lines() if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def leave(url):
    """Ask for a long stream, and go away after the first pieces."""
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True, "seed": 1}
    with requests.post(f"{url}/v1/completions", json=given, stream=True) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 4:
                return


def plain(answer):
    """An answer without what differs from run to run."""
    if isinstance(answer, dict):
        return {
            name: plain(value) for name, value in answer.items() if name not in ("id", "created", "system_fingerprint")
        }
    return [plain(item) for item in answer] if isinstance(answer, list) else answer


def talk(url):
    messages = [{"role": "user", "content": "1+1"}]
    completions, chat = "/v1/completions", "/v1/chat/completions"
    found = {
        "completion": ask(url, completions, prompt=PROMPT, return_token_ids=True),
        "several": ask(url, completions, prompt=[PROMPT, [*PROMPT, 5]], n=2, return_token_ids=True),
        "logprobs": ask(url, completions, prompt=PROMPT, logprobs=2, return_token_ids=True),
        "chat": ask(url, chat, messages=messages, return_token_ids=True),
        "chat_logprobs": ask(url, chat, messages=messages, logprobs=True, top_logprobs=2, return_token_ids=True),
        "stream": ask(url, completions, prompt=PROMPT, stream=True, return_token_ids=True),
        "chat_stream": ask(url, chat, messages=messages, stream=True, return_token_ids=True),
        "refused": ask(url, completions, prompt=[3] * 100),
    }
    leave(url)
    return plain(found)


def client(url, result):
    try:
        while True:
            try:
                if requests.get(f"{url}/health").ok:
                    break
            except requests.ConnectionError:
                time.sleep(0.5)
        answers = talk(url)
        time.sleep(1)  # the server learns that a client has gone
        tiny.finish(result, **answers)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    tiny.save_model(arguments.model)
    template = Path(f"{arguments.model}.jinja")
    template.write_text(servers.TEMPLATE)
    port = servers.free_port()
    threading.Thread(target=client, args=(f"http://127.0.0.1:{port}", arguments.result), daemon=True).start()
    more = ["--served-model-name", "tiny", "--chat-template", str(template)]
    sys.argv[1:] = [*servers.settings(arguments.model, port), *more]
    runpy.run_module(servers.MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
