"""Trainers that are not TRL's own classes, as users and libraries make them."""

import sys
from pathlib import Path
from types import ModuleType

import torch


def derived(base):
    """A class below TRL's, with advantages and a loss of its own."""

    class Reinforce(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = 2 * output["advantages"]
            return output

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].shape[1]
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
            return -(inputs["advantages"][:, None] * logprobs * inputs["completion_mask"]).sum(1).mean()

    return Reinforce


def copied(base):
    """A class of the same source in another module, as unsloth generates it."""
    path = Path(sys.modules[base.__module__].__file__)
    module = ModuleType("compiled_cache.CopiedGRPOTrainer")
    module.__package__, module.__file__ = "trl.trainer", str(path)
    sys.modules[module.__name__] = module
    source = path.read_text().replace("class GRPOTrainer(", "class CopiedGRPOTrainer(")
    exec(compile(source, str(path), "exec"), vars(module))
    return module.CopiedGRPOTrainer


def other(base):
    """A class whose functions have other names."""

    class PolicyTrainer(base):
        def _generate_and_score_rollouts(self, inputs):
            return super()._generate_and_score_completions(inputs)

        _generate_and_score_completions = None

        def _prepare_inputs(self, generation_batch):
            self._generate_and_score_completions = self._generate_and_score_rollouts
            return super()._prepare_inputs(generation_batch)

    return PolicyTrainer
