"""Models with adapters of PEFT that matter, and what a trace says of a model."""

import peft
import torch

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def with_adapters(model, **changes):
    """The model with LoRA's adapters, none of them zero."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**LORA | changes), autocast_adapter_dtype=False)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return wrapped


def identity(model):
    """What a recorder is told of a model, with adapters or without."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    found = {"class": f"{type(base).__module__}.{type(base).__qualname__}", "config": base.config.to_dict()}
    if base is not model:
        adapters = {name: config.to_dict() for name, config in model.peft_config.items()}
        found |= {"adapters": adapters, "active_adapter": model.active_adapter}
    return found
