"""README's table "Record or import a run": each row is a thing that a test ran, and these are the tests."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()

RAN = {
    "TRL (GRPO, RLOO": (
        "tracer/test_trl.py::test_training_with_vllm_is_the_same_bit_for_bit_whether_recorded_or_not",
        "tracer/test_trl.py::test_stats_like_trl_are_what_trl_logged",
        "tracer/test_trl.py::test_rloo_s_rollout_logprobs_are_recorded_though_the_trainer_throws_them_away",
        "tracer/test_trl.py::test_a_trainer_is_known_by_its_functions_wherever_its_class_comes_from",
        "tracer/test_trl.py::test_two_ranks_of_a_trainer_write_one_trace",
        "replay/test_replay.py::test_replaying_as_recorded_gives_every_bit_back",
        "replay/test_adapters.py::test_replaying_as_recorded_gives_every_bit_back",
        "replay/test_adapters.py::test_with_an_engine_every_pass_comes_back_bit_for_bit",
        "tracer/test_trl_async.py::test_sequences_are_the_trained_samples_and_no_token_of_the_tool_has_a_score",
        "tracer/test_trl_async.py::test_both_sides_tell_the_updates_that_their_weights_have_seen",
        "tracer/test_trl_async.py::test_every_bit_of_a_packed_row_and_its_gradient_come_back",
    ),
    "TRL with a vLLM server": (
        "tracer/test_vllm_server.py::test_rloo_with_a_server_trains_on_what_it_would_have_trained_on",
        "tracer/test_vllm_server.py::test_the_logprobs_of_rloo_s_server_are_recorded_though_rloo_asks_for_none",
    ),
    "verl 0.9 (PPOTrainer": (
        "tracer/test_verl_live.py::test_verl_s_numbers_come_out_as_verl_logged_them",
        "tracer/test_verl_workers.py::test_in_verl_s_own_precision_every_bit_comes_back_of_two_workers",
        "tracer/test_verl_live.py::test_replaying_gives_every_bit_of_the_trainer_s_logprobs",
        "tracer/test_verl_live.py::test_the_trainer_of_before_is_recorded_with_every_pass_and_the_numbers_that_it_logged",
    ),
    "verl's fully asynchronous trainer": (
        "tracer/test_verl_workers.py::test_a_step_of_the_asynchronous_trainer_is_what_verl_logs_under_its_number",
        "tracer/test_verl_workers.py::test_sequences_of_the_asynchronous_trainer_have_the_version_that_sampled_them",
        "tracer/test_verl_workers.py::test_steps_of_the_asynchronous_trainer_are_replayed",
        "tracer/test_verl_workers.py::test_what_of_the_asynchronous_engine_s_weights_is_not_recorded_is_said",
    ),
    "vLLM without a trainer": (
        "tracer/test_vllm.py::test_every_completion_is_recorded_with_the_engine_s_logprobs",
        "tracer/test_vllm_async.py::test_every_completion_is_recorded_with_the_engine_s_logprobs",
        "tracer/test_vllm_async.py::test_requests_that_run_together_are_a_step_and_a_name_that_comes_again_gets_a_number",
    ),
    "vLLM as a server": (
        "tracer/test_vllm_server.py::test_clients_get_what_they_would_have_got",
        "tracer/test_vllm_server.py::test_what_clients_were_given_is_recorded_with_the_engine_s_logprobs",
        "tracer/test_vllm_server.py::test_ctrl_c_ends_the_server_and_the_trace_is_finished",
    ),
    "your own training loop": (
        "test_docs.py::test_the_loop_of_one_s_own_that_a_page_shows_is_recorded_and_replayed",
        "replay/test_replay.py::test_a_loop_of_one_s_own_can_be_replayed",
        "replay/test_replay.py::test_a_model_factory_builds_what_transformers_does_not_know",
    ),
    "dumps from verl, slime, miles, SkyRL": (
        "tracer/test_import_dumps.py::test_stats_of_an_import_are_those_of_the_arrays",
        "tracer/test_import_remote.py::test_an_import_from_a_url_is_that_from_the_folder",
        "tracer/test_attach.py::test_what_is_attached_already_stays_unless_it_is_replaced",
        "analysis/test_verl.py::test_numbers_of_an_imported_dump_are_verl_s_own_of_its_arrays",
    ),
    "a table with logprobs from both sides": (
        "tracer/test_import_formats.py::test_every_form_gives_the_trace_that_json_lines_give",
        "tracer/test_attach.py::test_a_parquet_file_is_replayed_with_an_attached_model",
    ),
}  # fmt: skip
"""Start of a row's first cell -> tests that run what the row says, those of the first command first."""


def rows():
    (table,) = re.findall(
        r"^## Record or import a run\n\n(?:[^|].*\n|\n)*\|.*\n\|[-|]*\n((?:\|.*\n)+)", README, re.MULTILINE
    )
    return [line.split("|")[1].strip() for line in table.splitlines()]


def test_every_row_names_tests():
    unnamed = [row for row in rows() if not any(row.startswith(start) for start in RAN)]
    assert not unnamed
    assert all(any(row.startswith(start) for row in rows()) for start in RAN)


@pytest.mark.parametrize("test", [test for tests in RAN.values() for test in tests])
def test_the_tests_are_there(test):
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
