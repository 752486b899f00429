"""Mistakes in the transfer of weights to vLLM, as a user's own code makes them: nothing here knows of tim-trace."""

import torch


def _weights(trainer):
    return [(name, tensor.detach().clone()) for name, tensor in trainer.vllm_generation._iter_named_params()]


def _load(trainer, weights):
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, tensor in weights:
        model.load_weights([(name, tensor)])
    trainer.vllm_generation.llm.reset_prefix_cache()


def skips(trainer):
    """The second layer's down_proj is left out from the second transfer on."""
    complete = trainer.vllm_generation._iter_named_params
    count = 0

    def most():
        nonlocal count
        count += 1
        for name, tensor in complete():
            if count == 1 or name != "model.layers.1.mlp.down_proj.weight":
                yield name, tensor

    trainer.vllm_generation._iter_named_params = most


def late(trainer):
    """What is sent is what was there a step before."""
    before = []

    def sync():
        now = _weights(trainer)
        _load(trainer, before or now)
        before[:] = now

    trainer.vllm_generation.sync_weights = sync


def never(trainer):
    """Nothing is sent: the engine stays at what it read from disk."""
    trainer.vllm_generation.sync_weights = lambda: None


def unmerged(trainer):
    """The adapter's base weights are sent as they are."""

    def sync():
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights = []
        for name, parameter in model.named_parameters():
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if "lora_" not in name:
                weights.append((name, parameter.data))
        _load(trainer, weights)

    trainer.vllm_generation.sync_weights = sync


def _through(dtype):
    def cast(trainer):
        complete = trainer.vllm_generation._iter_named_params

        def rounded():
            for name, tensor in complete():
                yield name, tensor.to(dtype).to(tensor.dtype)

        trainer.vllm_generation._iter_named_params = rounded

    return cast


def drops(trainer):
    """The engine's own loader passes a tensor over without a word, though it is given."""
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    inner = model.model.layers[1].mlp.down_proj.weight
    inner.weight_loader = lambda *_: None


def coarse(trainer):
    """Linear layers have two bits, of a scale of their own."""
    complete = trainer.vllm_generation._iter_named_params

    def rounded():
        for name, tensor in complete():
            if name.endswith("_proj.weight"):
                scale = tensor.abs().max()
                tensor = (tensor / scale).round() * scale
            yield name, tensor

    trainer.vllm_generation._iter_named_params = rounded


def scales(trainer):
    """Each tensor is a thousandth too large: the trainer never had what is sent."""
    complete = trainer.vllm_generation._iter_named_params

    def larger():
        for name, tensor in complete():
            yield name, tensor * 1.001

    trainer.vllm_generation._iter_named_params = larger


FAULTS = {
    "skips": skips,
    "late": late,
    "never": never,
    "unmerged": unmerged,
    "fp8": _through(torch.float8_e4m3fn),
    "bf16": _through(torch.bfloat16),
    "drops": drops,
    "coarse": coarse,
    "scales": scales,
}
