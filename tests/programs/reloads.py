"""What a vLLM server's workers load beside vLLM, so that a CPU's weights can be replaced over HTTP: `--worker-extension-cls`."""

import tiny

tiny.keep_weights_reloadable()


class Reloads:
    def reload_file(self, path):
        from safetensors.torch import load_file

        self.model_runner.model.load_weights(load_file(path).items())
