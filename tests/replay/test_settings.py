"""Torch's switches of a recorded pass, set again and put back."""

import os
import warnings

import pytest
import torch
from tim_trace.replay import settings as module
from tim_trace.replay.arms import Arm
from tim_trace.replay.settings import CUBLAS, settings, switches, used_settings
from tim_trace.schemas.errors import TimTraceWarning
from tim_trace.tracer.environment import torch_settings

OTHER = {
    "deterministic_algorithms": True, "mkldnn": False, "cudnn_allow_tf32": False, "cuda_bf16_reduced_precision_reduction": False,
    "cuda_fp16_reduced_precision_reduction": False, "cudnn_deterministic": True, "cudnn_benchmark": True, "sdp_flash": False,
    "sdp_mem_efficient": False, "sdp_math": False, "sdp_cudnn": False, "num_threads": 3,
}  # fmt: skip
INFORMATIVE = {
    "default_dtype", "num_interop_threads", "cpu_capability", "cuda", "cudnn", "cuda_matmul_allow_tf32",
}  # fmt: skip
"""Facts about the machine, settings used while building models, and an alias of another precision setting."""


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(module, "_cuda_began", [])


def test_every_recorded_setting_is_set_again_or_is_said_to_inform():
    assert {*switches(), "cublas_workspace_config"} | INFORMATIVE == set(torch_settings())
    assert not INFORMATIVE & set(switches())


@pytest.mark.parametrize("name", OTHER)
def test_a_switch_is_set_as_recorded_and_put_back(name):
    before = torch_settings()
    recorded = before | {name: OTHER[name]}
    assert before[name] != OTHER[name]
    with settings(recorded, Arm()):
        now = torch_settings()
        if name != "mkldnn" or torch.backends.mkldnn.is_available():
            assert now == recorded | (
                {"cublas_workspace_config": ":4096:8"} if name == "deterministic_algorithms" else {}
            )
    assert torch_settings() == before


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_precisions_of_torch_s_newer_interface_are_recorded_and_set_again(precision):
    before = torch_settings()
    torch.backends.fp32_precision = precision  # as TrainingArguments(tf32=...) sets it
    try:
        recorded = torch_settings()
    finally:
        torch.backends.fp32_precision = "none"
    assert recorded["fp32_precision"] == precision
    with settings(recorded, Arm()):
        assert torch_settings() == recorded
    with settings(recorded, Arm(dtype="fp32")):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch_settings() == before


def test_a_library_that_is_not_there_leaves_the_one_that_is():
    found = used_settings({"cuda_preferred_blas": "nonsense"}, Arm())
    assert found["cuda_preferred_blas"] == torch_settings()["cuda_preferred_blas"]


@pytest.mark.parametrize(
    ("recorded", "arm", "before", "found"),
    [
        ({"cublas_workspace_config": ":16:8"}, Arm(), None, ":16:8"),
        ({"cublas_workspace_config": None}, Arm(), ":16:8", None),
        ({}, Arm(), ":16:8", ":16:8"),
        ({}, Arm(), None, None),
        ({}, Arm(deterministic=True), None, ":4096:8"),
        ({"cublas_workspace_config": None}, Arm(deterministic=True), ":16:8", ":16:8"),
        ({"cublas_workspace_config": ":16:8"}, Arm(deterministic=True), None, ":16:8"),
        ({"deterministic_algorithms": True, "cublas_workspace_config": None}, Arm(), None, ":4096:8"),
    ],
)
def test_cublas_is_told_before_cuda_starts(monkeypatch, recorded, arm, before, found):
    if before is not None:
        monkeypatch.setenv(CUBLAS, before)
    with warnings.catch_warnings(action="error"), settings(recorded, arm):
        assert os.environ.get(CUBLAS) == found
    assert os.environ.get(CUBLAS) == before


def test_where_cuda_has_started_with_another_workspace_it_is_said_and_the_contract_has_that_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(
        TimTraceWarning, match=r"arm deterministic: CUBLAS_WORKSPACE_CONFIG is :4096:8 .* CUDA started without it"
    ):
        assert used_settings({}, Arm(deterministic=True))["cublas_workspace_config"] is None
    with warnings.catch_warnings(action="error"), settings({"cublas_workspace_config": None}, Arm()):
        pass


def test_an_arm_that_starts_cuda_leaves_its_workspace_to_those_that_follow(monkeypatch):
    with settings({}, Arm(deterministic=True)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.warns(
            TimTraceWarning, match=r"arm as-recorded: .* is not set for this arm, but CUDA started with :4096:8"
        ),
        settings({}, Arm()),
    ):
        pass
