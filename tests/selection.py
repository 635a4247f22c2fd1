"""How many cases of long parametrised tests `make test` runs; `make test-all` runs all of them.

By file and test, how many cases stay, spread evenly over the list, the first and the last among them; 0: none. Each is
here because its cases differ in one value of a list (a stage, an optimizer, a kind of loop) and together took more than
ten seconds; what they hold is held by others, or by those that stay. Chosen from `--durations=0`.

Of other tests that run on ranks once for each of the four stages, two stages stay: 1 and 3, or 0 and 2, as a hash of
the test's name says, so that tests beside each other take different ones.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

SOME: dict[str, dict[str, int]] = {
    "access/test_meta.py": {"test_an_unfilled_model_refuses_to_compute_and_says_how_to_fill_it": 1},
    "checkpoint/files/test_branches.py": {"test_ranks_and_hosts_agree_on_it": 1},
    "checkpoint/test_async.py": {"test_values_are_those_at_the_call_though_training_goes_on_at_once": 1},
    "checkpoint/test_attendance.py": {"test_notes_do_not_pile_up": 0},
    "checkpoint/test_divided.py": {
        "test_a_resumed_run_goes_on_in_the_same_bits": 3,
        "test_a_checkpoint_loads_at_any_other_mesh": 3,
    },
    "checkpoint/test_edges.py": {"test_a_run_that_went_back_keeps_what_it_saves": 0},
    "checkpoint/test_faults.py": {"test_whatever_call_fails_the_latest_loads_and_the_run_goes_on": 1},
    "checkpoint/test_faults_elsewhere.py": {"test_whatever_call_fails_there_the_latest_loads_and_the_run_goes_on": 0},
    "checkpoint/test_kill.py": {"test_no_kill_around_a_save_loses_a_checkpoint_or_loads_wrong_values": 1},
    "checkpoint/test_shapes.py": {"test_a_checkpoint_of_one_shape_loads_at_another": 1},
    "checkpoint/test_shortened.py": {"test_a_save_from_a_shortened_file_is_one_sentence": 1},
    "checkpoint/weights/test_export.py": {
        "test_every_stage_writes_the_plain_models_state_dict": 1,
        "test_an_export_from_a_checkpoint_takes_memory_for_a_batch_not_for_the_model": 0,
    },
    "comm/launch/test_launch.py": {
        "test_nobody_on_the_network_is_let_in": 1,
        "test_a_script_without_a_guard_sends_closures_and_exits_quietly": 0,
        "test_a_failing_rank_ends_those_that_wait_for_it_in_a_collective": 1,
    },
    "comm/test_frozen.py": {"test_a_rank_that_freezes_or_dies_does_not_hold_the_other": 1},
    "comm/test_meeting.py": {"test_a_rank_that_leaves_the_path_is_named_on_every_rank": 12},
    "comm/test_verbs.py": {"test_asking_gloo_whether_a_gather_is_done_does_not_hang_under_a_profiler": 0},
    "examples/test_experts.py": {"test_experts_lower_the_held_out_loss": 0},
    "examples/test_fetch.py": {"test_ranks_that_ask_at_once_fetch_once": 0},
    "examples/test_language.py": {
        "test_gpt_pretraining_lowers_the_held_out_loss": 0,
        "test_a_llama_cut_by_tensor_parallelism_goes_on_at_another_mesh": 0,
    },
    "examples/test_parallel_gpt.py": {"test_a_checkpoint_goes_on_at_another_mesh_and_is_exported": 0},
    "examples/test_vision.py": {"test_the_mnist_network_learns_at_stage_3": 0},
    "features/test_chunked_loss.py": {"test_every_stage_gives_the_same_bits_and_the_plain_loss": 1},
    "features/test_fp8.py": {"test_stage_pairs_give_the_same_bits": 0, "test_stages_and_codes_give_the_same_bits": 2},
    "features/test_join.py": {
        "test_five_against_seven_batches_equal_plain_pytorch": 2,
        "test_two_models_in_one_block": 2,
    },
    "features/test_pipeline.py": {
        "test_evaluation_in_between_and_two_steps_of_the_schedule": 2,
        "test_overlap_and_recomputation_keep_the_bits": 1,
    },
    "features/test_recompute.py": {
        "test_compiled_units_are_computed_again_by_the_compiler_and_offloaded": 1,
        "test_the_bits_are_those_without_and_each_call_is_computed_twice": 2,
    },
    "optim/owners/test_owners.py": {
        "test_any_matrix_optimizer_equals_one_process_at_every_stage": 4,
        "test_state_an_owner_keeps_goes_in_and_out": 6,
    },
    "optim/parts/test_counters.py": {"test_counters_move_once_per_step_on_every_rank": 4},
    "optim/parts/test_methods.py": {"test_schedulefree_equals_one_process": 5},
    "optim/parts/test_pieces.py": {"test_a_run_goes_on_at_another_world_size_from_pieces": 5},
    "optim/streaming/test_ahead.py": {"test_what_comes_before_step_finds_state_as_it_is": 0},
    "optim/streaming/test_streaming.py": {"test_every_optimizer_takes_its_own_step_chunk_by_chunk": 0},
    "optim/test_every_optimizer.py": {"test_it_equals_one_process_at_every_stage": 8},
    "optim/test_new_groups.py": {"test_a_drop_in_takes_new_parameters": 5},
    "optim/test_state_dicts.py": {"test_each_rank_resumes_from_its_own_in_bits": 10},
    "optim/test_stepper.py": {"test_state_dicts_round_trip_in_bits": 8},
    "parallel/test_tensor.py": {"test_options_change_no_bit": 0, "test_memory_of_dtensors_is_given_back": 2},
    "parity/test_axes.py": {
        "test_float64_is_plain_pytorch_in_one_process": 1,
        "test_features_do_not_change_a_bit_between_pairs": 4,
        "test_all_pairs_of_stages_give_the_same_bits": 1,
        "test_bytes_at_rest_and_sent_are_those_of_the_formulas": 1,
        "test_join_the_average_and_streamed_weights_at_every_pair": 0,
    },
    "parity/test_by_hand.py": {
        "test_the_script_checks_itself": 0,
        "test_zeor_equals_zero_by_hand_in_bits_at_every_stage": 2,
    },
    "parity/test_compile.py": {"test_compiled_units_do_not_recompile_and_keep_loss_and_names": 2},
    "parity/test_drop_in.py": {"test_same_bits_as_shard": 2, "test_loop": 8, "test_model": 5, "test_odd_sizes": 2},
    "parity/test_entries.py": {"test_methods": 4},
    "parity/test_experts.py": {"test_a_line_of_ranks_leaves_a_mixture_out": 1},
    "parity/test_graphs.py": {
        "test_several_sharded_models_in_one_loss": 2,
        "test_one_model": 4,
        "test_one_module_twice_in_one_forward": 3,
    },
    "parity/test_offload.py": {"test_state_at_rest_elsewhere_changes_no_bit": 3},
    "parity/test_plain.py": {
        "test_loop": 9,
        "test_odd_sizes": 5,
        "test_model": 6,
        "test_fp32_with_sgd": 2,
        "test_tied": 2,
        "test_model_with_two_backwards": 2,
    },
    "parity/test_release.py": {"test_it_changes_no_bit_at_any_stage_and_place": 2},
    "parity/test_tensor.py": {"test_models_of_transformers": 1},
    "parity/test_wires.py": {"test_a_wire_across_gives_the_same_bits_where_updates_are_cut_alike": 0},
    "parity/test_zoo.py": {"test_stages_are_the_same_bits_and_equal_one_process": 5},
    "planner/test_budget.py": {"test_without_a_batch_the_device_stays_within_its_budget": 5},
    "planner/test_mesh_part.py": {"test_one_rank_of_256_on_a_fake_group_holds_what_was_predicted": 0},
    "planner/test_peaks.py": {"test_peaks_of_the_largest_are_within_5_percent_of_those_measured_and_never_under": 0},
    "planner/test_rests.py": {
        "test_resident_bytes_by_role_and_tier_are_exact": 1,
        "test_gradients_on_the_device_are_exact": 1,
        "test_windows_are_as_large_as_planned": 1,
    },
    "planner/test_wires.py": {"test_bytes_are_as_foreseen": 1},
    "replan/test_kept.py": {"test_matrices_of_owners_travel": 1},
    "step/test_memory.py": {"test_resident_bytes_are_those_of_the_table": 12},
    "step/test_norms.py": {
        "test_stock_clipping_by_norm": 7,
        "test_stock_clipping_on_three_ranks": 2,
        "test_arithmetic_on_gradients_in_place": 2,
    },
    "step/test_zero_grad.py": {"test_gradients_from_inside_no_sync_can_be_set_to_zero": 5},
    "test_api.py": {"test_500_steps_with_flat_memory": 0},
    "test_documents.py": {"test_it_goes_on_with_another_number_of_ranks_from_the_middle_of_an_epoch": 0},
    "test_examples.py": {"test_stage3_learns_and_saves_plain_weights": 0, "test_drop_in_learns": 0},
    "test_hosts.py": {"test_both_hosts_and_all_stages_end_with_the_same_bits": 0},
    "test_import.py": {"test_the_same_script_under_slurms_variables": 0},
    "test_logging.py": {
        "test_the_users_own_logging_decides_how_it_looks": 0,
        "test_a_level_silences_it": 0,
        "test_a_run_prints_at_most_five_lines_from_rank_0": 0,
    },
    "test_lora.py": {"test_lora_equals_one_process": 2},
    "test_teardown.py": {"test_shard_train_and_let_go_five_times_leaves_nothing": 3},
    "tools/importers/test_import_tool.py": {
        "test_numbered_parameters_of_several_groups_need_names": 0,
        "test_a_deepspeed_checkpoint_resumes_with_its_moments": 1,
        "test_a_dcp_checkpoint_of_fsdp2_resumes_at_another_world": 1,
    },
    "tools/test_cli.py": {"test_plan_says_what_fits_beside_a_gpu": 0},
    "tools/test_interrupt.py": {
        "test_without_a_folder_ctrl_c_ends_it_with_one_line": 0,
        "test_ctrl_c_saves_says_so_and_leaves_with_130": 0,
    },
    "tools/test_train.py": {"test_a_small_run_learns_and_measures": 0, "test_a_wire_is_shown_in_the_step_line": 0},
}  # fmt: skip


def kept(count: int, total: int) -> set[int]:
    """Which of `total` cases stay, as numbers."""
    count = min(count, total)
    if count < 2:
        return set(range(count))
    return {round(number * (total - 1) / (count - 1)) for number in range(count)}


def kept_stages(name: str) -> set[int]:
    """Of a test that is run at every stage."""
    return {0, 2} if zlib.crc32(name.encode()) % 3 == 0 else {1, 3}


def leave_stages(items: Iterable[pytest.Item]) -> None:
    """Mark as whole the stages that do not stay, where a test on ranks runs at all four."""
    by_rest: dict[tuple[str, str], dict[int, pytest.Item]] = defaultdict(dict)
    for item in items:
        params = dict(getattr(getattr(item, "callspec", None), "params", {}))
        stage = params.pop("stage", None)
        on_ranks = "ranks" in getattr(item, "fixturenames", ())
        if type(stage) is int and on_ranks and not item.get_closest_marker("whole"):
            by_rest[item.nodeid.partition("[")[0], repr(params)][stage] = item
    for (name, _), cases in by_rest.items():
        if set(cases) == {0, 1, 2, 3}:
            for stage in set(cases) - kept_stages(name):
                cases[stage].add_marker(pytest.mark.whole)


def leave_to_test_all(items: Iterable[pytest.Item]) -> None:
    """Mark as whole what does not stay."""
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file, name = _place(item)
        if name in SOME.get(file, ()) and not item.get_closest_marker("whole"):
            cases[file, name].append(item)
    for (file, name), members in cases.items():
        stay = kept(SOME[file][name], len(members))
        for number, item in enumerate(members):
            if number not in stay:
                item.add_marker(pytest.mark.whole)
    leave_stages(item for item in items if _place(item) not in cases)


def _place(item: pytest.Item) -> tuple[str, str]:
    """File and name of a test, as in the table."""
    file, _, name = item.nodeid.removeprefix("tests/").partition("::")
    return file, name.partition("[")[0]
