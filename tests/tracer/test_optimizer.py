import pytest
import torch
from temporaries import MOST_BYTES, most_beside
from tim_trace.analysis.query import sql
from tim_trace.tracer.optimizer import optimizer_statistics, underlying
from tim_trace.tracer.recorder import Recorder

ADAM = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()


def train(model, optimizer, seed):
    optimizer.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(4, 5, dtype=torch.double)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ADAM)
def test_the_update_is_what_the_weights_moved_by(name):
    kind, settings = ADAM[name]
    model = model_of()
    # Two groups, one of them with a rate of its own.
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
    optimizer = kind(groups, lr=1e-3, **settings)
    assert optimizer_statistics(optimizer) == {}
    for step in range(4):
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        train(model, optimizer, step)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        found = optimizer_statistics(optimizer)
        # Decoupled decay is taken of the weights before the step, and read from those after it: a relative 1e-3.
        moved = float((after - before).norm())
        assert float(found["optimizer/update_norm"]) == pytest.approx(
            moved, rel=2e-3 if settings.get("weight_decay") else 1e-6
        )
        assert float(found["optimizer/weight_norm"]) == pytest.approx(float(after.norm()), rel=1e-6)
        ratio = float(found["optimizer/update_norm"] / found["optimizer/weight_norm"])
        assert float(found["optimizer/update_to_weight"]) == pytest.approx(ratio, rel=1e-6)
        assert ("optimizer/second_moment" in found) == (name != "momentum")


def test_a_layer_that_was_frozen_for_a_while_has_its_own_bias_correction():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        train(model, optimizer, step)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = optimizer_statistics(optimizer)
    assert float(found["optimizer/update_norm"]) == pytest.approx(float((after - before).norm()), rel=1e-6)


def test_the_second_moment_is_the_mean_of_v_hat():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    for step in range(3):
        train(model, optimizer, step)
    moments = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    expected = float(moments.mean()) / (1 - 0.99**3)
    assert float(optimizer_statistics(optimizer)["optimizer/second_moment"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_a_large_tensor_are_right_to_single_precision(dtype):
    """A gradient of ones: torch's own norm on a CPU, which adds one element after another, is off by a percent."""
    parameter = torch.full((1000, 2000), 0.5, dtype=dtype).requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state, root = optimizer.state[parameter], 2_000_000**0.5
    found = {name: float(value) for name, value in optimizer_statistics(optimizer).items()}
    assert found["optimizer/second_moment"] == pytest.approx(float(state["exp_avg_sq"][0, 0]) / (1 - 0.999), rel=1e-6)
    assert found["optimizer/weight_norm"] == pytest.approx(float(parameter[0, 0].detach()) * root, rel=1e-6)
    assert found["optimizer/update_norm"] == pytest.approx(1e-4 * root, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_reading_changes_neither_weights_nor_state():
    trained = []
    for reads in (False, True):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            train(model, optimizer, step)
            if reads:
                optimizer_statistics(optimizer)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        trained.append([*(p.detach() for p in model.parameters()), *state])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_an_optimizer_without_a_known_state_says_nothing():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0)
    assert optimizer_statistics(optimizer) == {}
    assert underlying(object()) is None


def test_a_loop_records_its_optimizer(tmp_path):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    expected = []
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            recorder.add_optimizer(step, optimizer)
            expected.append(float(optimizer_statistics(optimizer)["optimizer/update_to_weight"]))
    rows = sql(
        tmp_path / "run", "SELECT value FROM metrics WHERE name = 'optimizer/update_to_weight' ORDER BY step"
    ).rows
    assert [value for (value,) in rows] == expected


def test_the_settings_of_several_groups_are_the_largest():
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)]
    groups = [{"params": layers[0].parameters(), "weight_decay": 0.0}, {"params": layers[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.02)
    layers[1](layers[0](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    found = optimizer_statistics(optimizer)
    settings = {"lr": 0.5, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.02}
    assert {name: found[f"optimizer/{name}"] for name in settings} == settings
    assert "optimizer/momentum" not in found


def made_steps(shape, turned=False, dtype=torch.float32):
    """An AdamW of one parameter, as a step would leave it."""
    weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype).t() if turned else torch.ones(shape, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], amsgrad=turned)
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(weight)}
    optimizer.state[weight] |= {
        name: torch.rand_like(weight) for name in ("exp_avg_sq", "max_exp_avg_sq")[: 1 + turned]
    }
    return optimizer


@pytest.mark.parametrize("turned", [False, True])
def test_statistics_of_pieces_are_those_of_the_whole(monkeypatch, turned):
    optimizer = made_steps((37, 23), turned, torch.float64)
    whole = optimizer_statistics(optimizer)
    monkeypatch.setattr("tim_trace.tracer.optimizer.CHUNK_BYTES", 8 * 50)
    found = optimizer_statistics(optimizer)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in whole.items()}, rel=1e-6
    )


@pytest.mark.parametrize("turned", [False, True])
def test_statistics_take_little_beside_a_large_tensor(turned):
    optimizer = made_steps((4096, 6144), turned)
    assert most_beside(optimizer_statistics, optimizer) <= MOST_BYTES


def test_statistics_that_run_out_of_memory_end_alone(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tim_trace.tracer.recorder.optimizer_statistics", full)
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2):
            recorder.add_optimizer(step, made_steps((2, 3)))
            recorder.add_metrics(step, {"loss": 0.5})
    said = "no longer recorded: optimizer statistics (OutOfMemoryError: CUDA out of memory)"
    assert capsys.readouterr().err.count(said) == 1
    assert sql(tmp_path / "run", "SELECT step, name FROM metrics ORDER BY ALL").rows == [(1, "loss"), (2, "loss")]
