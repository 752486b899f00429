import json

from tim_trace.analysis.weights import export
from tim_trace.tracer.recorder import Recorder


def test_an_export_names_the_class_that_the_config_of_a_model_made_here_does_not(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1))
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(
            model={"class": f"{type(model).__module__}.Qwen3ForCausalLM", "config": model.config.to_dict()}
        )
        recorder.add_weights(0, model.state_dict())
    config = json.loads((export(tmp_path / "run", 0, tmp_path / "out") / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]  # vLLM takes a folder without for a pooling model
