"""How many cases of long parametrised tests `make test` runs; `make test-all` runs all of them.

By file and test, how many cases stay, spread evenly over the list, the first and the last among them; 0: none. Each is
here because its cases differ in one value of a list (a stage, an optimizer, a kind of loop) and together took more than
one second of a processor, or because it alone took more than five; what they hold is held by others, or by those that
stay. Chosen by the processor time of each test and its ranks, so that `make test` stays below 15 minutes of two cores.

Of other tests that run on ranks once for each of the four stages, two stages stay: 1 and 3, or 0 and 2, as a hash of
the test's name says, so that tests beside each other take different ones.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

SOME: dict[str, dict[str, int]] = {
    "access/test_blend.py": {"test_the_target_is_torch_lerp_of_both": 4},
    "access/test_meta.py": {
        "test_an_unfilled_model_refuses_to_compute_and_says_how_to_fill_it": 1,
        "test_meta_init_equals_eager_init_at_any_world_and_stage": 2,
        "test_streams_by_position_are_the_same_at_any_world_and_stage": 2,
        "test_a_filled_meta_model_trains_as_one_that_was_sharded_with_values": 3,
        "test_rank_0_may_hold_the_values_of_a_model_the_others_describe": 1,
    },
    "access/test_push.py": {
        "test_what_tensor_parallelism_has_cut_is_sent_whole": 1,
        "test_a_push_takes_a_bucket_and_a_unit": 1,
        "test_lora_is_merged_in_peft_s_bits": 3,
    },
    "access/test_stream.py": {
        "test_a_stream_that_some_ranks_leave_early_corrupts_nothing": 1,
        "test_a_stream_gives_what_full_params_shows": 3,
    },
    "access/test_trace.py": {"test_a_step_of_two_ranks_is_in_one_file": 4},
    "access/test_wiring.py": {"test_a_run_goes_on_by_another_wire": 1},
    "checkpoint/files/test_branches.py": {
        "test_ranks_and_hosts_agree_on_it": 0,
        "test_a_load_whose_checkpoint_is_deleted_meanwhile_takes_the_newer_one": 1,
    },
    "checkpoint/files/test_per_host.py": {"test_where_one_host_cannot_commit_none_does": 1},
    "checkpoint/files/test_two_jobs.py": {"test_whatever_the_order_what_is_visible_is_whole_and_the_last_stays": 5},
    "checkpoint/files/test_urls_shared.py": {"test_whatever_the_order_of_two_jobs_both_have_what_they_saved": 1},
    "checkpoint/test_async.py": {"test_values_are_those_at_the_call_though_training_goes_on_at_once": 0},
    "checkpoint/test_attendance.py": {"test_notes_do_not_pile_up": 0},
    "checkpoint/test_divided.py": {
        "test_a_resumed_run_goes_on_in_the_same_bits": 1,
        "test_a_checkpoint_loads_at_any_other_mesh": 1,
        "test_the_optimizer_goes_on_at_another_mesh": 1,
        "test_a_folder_of_weights_into_a_model_on_meta": 1,
        "test_values_are_global": 1,
    },
    "checkpoint/test_edges.py": {"test_a_run_that_went_back_keeps_what_it_saves": 0},
    "checkpoint/test_experts.py": {
        "test_a_checkpoint_loads_at_other_meshes_of_as_many_ranks": 0,
        "test_a_checkpoint_loads_on_fewer_ranks": 1,
        "test_values_are_global": 1,
    },
    "checkpoint/test_faults.py": {"test_whatever_call_fails_the_latest_loads_and_the_run_goes_on": 1},
    "checkpoint/test_faults_elsewhere.py": {"test_whatever_call_fails_there_the_latest_loads_and_the_run_goes_on": 0},
    "checkpoint/test_kill.py": {"test_no_kill_around_a_save_loses_a_checkpoint_or_loads_wrong_values": 1},
    "checkpoint/test_mutated_states.py": {"test_state_changed_with_care_is_refused_or_steps_as_torch_would": 1},
    "checkpoint/test_preempt.py": {"test_all_ranks_save_the_same_step_whoever_was_signalled": 1},
    "checkpoint/test_reshard.py": {"test_saved_at_any_world_and_stage_loads_here_at_every_stage": 1},
    "checkpoint/test_resume.py": {"test_losses_data_scaler_and_schedule_go_on_in_every_bit_from_mid_epoch": 2},
    "checkpoint/test_shapes.py": {"test_a_checkpoint_of_one_shape_loads_at_another": 1},
    "checkpoint/test_shortened.py": {"test_a_save_from_a_shortened_file_is_one_sentence": 1},
    "checkpoint/test_stages.py": {
        "test_the_optimizer_goes_on_at_another_grid": 1,
        "test_a_checkpoint_loads_at_any_other_grid": 0,
        "test_a_folder_goes_straight_into_stages_on_the_meta_device": 1,
        "test_a_resumed_run_goes_on_in_the_same_bits": 1,
        "test_all_stages_are_exported_as_one_model": 1,
    },
    "checkpoint/weights/test_conversions.py": {"test_files_of_transformers_are_loaded_and_written_as_it_does": 2},
    "checkpoint/weights/test_export.py": {
        "test_every_stage_writes_the_plain_models_state_dict": 1,
        "test_an_export_from_a_checkpoint_takes_memory_for_a_batch_not_for_the_model": 0,
    },
    "checkpoint/weights/test_pretrained.py": {
        "test_dtypes_are_converted_through_the_master": 2,
        "test_loading_over_trained_values_refreshes_the_masters": 2,
        "test_an_index_of_files_loads_as_plain_loading_does": 6,
    },
    "comm/launch/test_launch.py": {
        "test_nobody_on_the_network_is_let_in": 1,
        "test_a_script_without_a_guard_sends_closures_and_exits_quietly": 0,
        "test_a_failing_rank_ends_those_that_wait_for_it_in_a_collective": 1,
        "test_ranks_do_not_outlive_the_parent": 1,
    },
    "comm/test_axes.py": {"test_training_goes_on_over_other_groups_with_the_same_bits": 1},
    "comm/test_feedback.py": {"test_reduces_keep_what_they_do_not_send": 2},
    "comm/test_frozen.py": {"test_a_rank_that_freezes_or_dies_does_not_hold_the_other": 1},
    "comm/test_links.py": {"test_every_rank_measures_the_same_along_each_axis": 2},
    "comm/test_meeting.py": {"test_a_rank_that_leaves_the_path_is_named_on_every_rank": 6},
    "comm/test_verbs.py": {"test_asking_gloo_whether_a_gather_is_done_does_not_hang_under_a_profiler": 0},
    "comm/test_wires.py": {"test_gathers_and_reduces_by_every_codec": 1},
    "data/test_stream.py": {
        "test_batches_are_the_same_with_any_number_of_workers": 4,
        "test_batches_that_workers_prefetched_do_not_count": 2,
    },
    "examples/test_experts.py": {"test_experts_lower_the_held_out_loss": 0},
    "examples/test_fetch.py": {"test_ranks_that_ask_at_once_fetch_once": 0},
    "examples/test_language.py": {
        "test_gpt_pretraining_lowers_the_held_out_loss": 0,
        "test_a_llama_cut_by_tensor_parallelism_goes_on_at_another_mesh": 0,
    },
    "examples/test_parallel_gpt.py": {"test_a_checkpoint_goes_on_at_another_mesh_and_is_exported": 0},
    "examples/test_two_tower.py": {"test_ranks_with_different_towers_train_as_one_process": 1},
    "examples/test_vision.py": {"test_the_mnist_network_learns_at_stage_3": 0},
    "features/test_auto_wire.py": {
        "test_with_updates_beside_the_next_step": 1,
        "test_exact_until_the_choice_and_then_as_by_set_wire": 1,
        "test_a_run_that_resumes_goes_on_by_the_wire_that_was_chosen": 1,
    },
    "features/test_buffers.py": {
        "test_every_rank_has_the_mean_of_the_statistics_and_evaluates_the_same": 1,
        "test_one_collective_per_step_and_none_where_nothing_changed": 1,
    },
    "features/test_chunked_loss.py": {"test_every_stage_gives_the_same_bits_and_the_plain_loss": 1},
    "features/test_fp8.py": {
        "test_stage_pairs_give_the_same_bits": 0,
        "test_stages_and_codes_give_the_same_bits": 1,
        "test_rowwise_recipes_give_the_same_bits_at_all_stages": 1,
        "test_scales_of_all_weights_are_one_exchange_per_step": 1,
        "test_reads_see_codes_and_writes_reach_the_master": 2,
    },
    "features/test_freezing.py": {
        "test_parameters_frozen_at_shard_can_be_unfrozen_at_any_step": 1,
        "test_freezing_later_keeps_the_optimizer_state_for_the_day_it_trains_again": 1,
        "test_what_is_frozen_may_be_used_by_one_rank_alone_at_once": 1,
    },
    "features/test_join.py": {
        "test_five_against_seven_batches_equal_plain_pytorch": 2,
        "test_two_models_in_one_block": 1,
        "test_clipping_momentum_and_a_scheduler_inside_join": 1,
        "test_ranks_on_different_ways_through_the_model_while_another_has_left": 2,
        "test_accumulation_inside_join_counts_each_micro_batch_over_the_ranks_that_had_it": 1,
        "test_a_drop_in_optimizer_in_the_place_of_the_model": 2,
        "test_ranks_without_any_batch_and_ranks_that_leave_one_by_one": 1,
        "test_totals_clamping_and_full_params_inside_join": 2,
        "test_after_the_block_gradients_settings_and_averages_are_those_of_all_ranks": 1,
    },
    "features/test_keeping.py": {"test_micro_batches_and_forwards_before_backwards": 0},
    "features/test_nonfinite.py": {
        "test_a_factor_that_is_not_finite_on_one_rank_skips_or_raises_on_all": 2,
        "test_skip_leaves_everything_untouched_on_every_rank": 3,
    },
    "features/test_own_checkpoints.py": {
        "test_loops_and_formats": 1,
        "test_what_fits_is_computed_once_in_the_same_bits": 1,
        "test_checkpoints_around_more_than_a_block": 1,
        "test_a_checkpoint_that_is_not_reentrant_computes_its_blocks_again_with_their_products": 1,
        "test_a_language_model_of_transformers": 1,
    },
    "features/test_pipeline.py": {
        "test_evaluation_in_between_and_two_steps_of_the_schedule": 1,
        "test_overlap_and_recomputation_keep_the_bits": 1,
        "test_finding_shapes_leaves_no_trace": 1,
        "test_memory_is_what_was_predicted": 1,
        "test_units_stay_for_a_step_or_for_an_action": 1,
        "test_stages_behind_a_frozen_one_train": 3,
    },
    "features/test_recompute.py": {
        "test_compiled_units_are_computed_again_by_the_compiler_and_offloaded": 1,
        "test_the_bits_are_those_without_and_each_call_is_computed_twice": 1,
    },
    "integrations/test_plain_loops.py": {"test_a_program_gives_what_the_same_lines_give_in_one_process": 1},
    "memory/test_codecs.py": {"test_by_chance_the_mean_is_right": 2},
    "memory/test_sparse.py": {"test_one_of_each_run_travels_and_noise_says_which": 4},
    "memory/test_view.py": {"test_writes_outside_forward_last": 1, "test_writes_under_bf16_reach_the_master": 1},
    "optim/kernels/test_run.py": {"test_neighbours_are_one_run": 1},
    "optim/owners/test_owners.py": {
        "test_any_matrix_optimizer_equals_one_process_at_every_stage": 1,
        "test_state_an_owner_keeps_goes_in_and_out": 3,
        "test_muon_equals_one_process_at_every_stage": 1,
        "test_muon_beside_adamw_equals_one_process_at_every_stage": 1,
        "test_a_split_master_travels_whole": 1,
    },
    "optim/parts/test_counters.py": {
        "test_counters_move_once_per_step_on_every_rank": 1,
        "test_counters_of_a_group_that_one_rank_owns_alone": 1,
        "test_sums_over_all_parameters_where_every_rank_updates_everything": 1,
    },
    "optim/parts/test_methods.py": {
        "test_schedulefree_equals_one_process": 2,
        "test_schedulefree_in_bf16_stays_near_fp32": 3,
        "test_schedulefree_resumes_in_bits": 1,
        "test_swaps_do_not_wear_the_weights": 2,
    },
    "optim/parts/test_pieces.py": {"test_a_run_goes_on_at_another_world_size_from_pieces": 2},
    "optim/streaming/test_ahead.py": {
        "test_what_comes_before_step_finds_state_as_it_is": 0,
        "test_state_that_is_fetched_ahead_changes_no_bit": 1,
    },
    "optim/streaming/test_moments.py": {
        "test_each_step_stores_the_exact_moments_within_the_bound_and_exact_weights": 1,
    },
    "optim/streaming/test_streaming.py": {
        "test_every_optimizer_takes_its_own_step_chunk_by_chunk": 0,
        "test_gradients_at_rest_can_be_read_changed_and_dropped": 1,
    },
    "optim/test_drop_in.py": {
        "test_every_optimizer_equals_plain_pytorch": 5,
        "test_dropped_gradients_are_dropped": 1,
    },
    "optim/test_every_optimizer.py": {
        "test_it_equals_one_process_at_every_stage": 2,
        "test_a_closure_runs_once_and_gives_the_loss": 1,
        "test_an_optimizer_made_before_or_after_shard_keeps_its_groups_and_trains": 2,
    },
    "optim/test_new_groups.py": {"test_a_drop_in_takes_new_parameters": 2, "test_a_refused_group_leaves_no_trace": 2},
    "optim/test_own_state.py": {
        "test_edits_equal_plain_pytorch": 3,
        "test_edits_of_a_drop_in_equal_plain_pytorch": 4,
        "test_reads_show_this_ranks_part": 3,
    },
    "optim/test_state_dicts.py": {
        "test_each_rank_resumes_from_its_own_in_bits": 2,
        "test_rank_0_saves_and_all_load_is_refused_on_the_others": 4,
        "test_state_that_rests_elsewhere_is_loaded_from_itself_in_bits": 2,
    },
    "optim/test_stepper.py": {
        "test_state_dicts_round_trip_in_bits": 2,
        "test_schedulers_work_and_nothing_warns": 1,
        "test_state_is_cut_at_shard_and_whole_after_unshard": 4,
        "test_a_plain_optimizers_state_dict_is_cut": 4,
        "test_a_finite_scale_changes_nothing": 2,
        "test_an_optimizer_made_after_sharding": 5,
    },
    "optim/test_third_party.py": {
        "test_8_bit_states_are_the_same_bits_at_stages_1_to_3_and_close_to_one_process": 1,
        "test_a_hand_written_optimizer_with_a_counter_equals_one_process": 1,
        "test_8_bit_state_dicts_round_trip_in_bits": 1,
    },
    "optim/test_whole.py": {
        "test_it_is_the_state_of_a_plain_optimizer": 2,
        "test_another_optimizer_on_a_sharded_model": 2,
    },
    "parallel/test_experts.py": {
        "test_ranks_hold_what_was_predicted": 0,
        "test_each_lane_sends_along_its_own_axes": 1,
        "test_axes_of_experts": 2,
        "test_experts_that_ranks_hold_unequally_many_of": 2,
        "test_gradients_are_dtensors_of_the_mean_over_all_ranks": 1,
    },
    "parallel/test_tensor.py": {
        "test_options_change_no_bit": 0,
        "test_memory_of_dtensors_is_given_back": 1,
        "test_partial_gradients_are_summed_once_per_lane_and_step": 1,
        "test_the_state_of_an_average_is_loaded_from_whole_parameters": 1,
        "test_parameters_and_gradients_stay_dtensors": 1,
    },
    "parity/test_axes.py": {
        "test_float64_is_plain_pytorch_in_one_process": 1,
        "test_features_do_not_change_a_bit_between_pairs": 1,
        "test_all_pairs_of_stages_give_the_same_bits": 1,
        "test_bytes_at_rest_and_sent_are_those_of_the_formulas": 1,
        "test_join_the_average_and_streamed_weights_at_every_pair": 0,
    },
    "parity/test_axes_access.py": {"test_what_users_read_and_write_is_the_same_at_all_pairs": 1},
    "parity/test_by_hand.py": {
        "test_the_script_checks_itself": 0,
        "test_zeor_equals_zero_by_hand_in_bits_at_every_stage": 1,
        "test_clipping_by_hand_is_the_stock_call_in_bits": 2,
    },
    "parity/test_compile.py": {
        "test_compiled_units_do_not_recompile_and_keep_loss_and_names": 1,
        "test_a_whole_model_compiled_breaks_its_graph_at_units_and_is_right": 0,
    },
    "parity/test_conditional.py": {
        "test_experts_routed_by_data": 1,
        "test_experts_routed_by_data_on_three_ranks": 0,
        "test_layer_drop_differs_between_ranks": 1,
    },
    "parity/test_context.py": {"test_ranks_that_cut_a_sequence_are_one_process": 1},
    "parity/test_delay.py": {"test_stages_and_places_are_the_same_bits": 0},
    "parity/test_drop_in.py": {
        "test_same_bits_as_shard": 1,
        "test_loop": 2,
        "test_model": 2,
        "test_odd_sizes": 1,
        "test_plain_pytorch": 1,
        "test_ranks_take_different_paths": 2,
    },
    "parity/test_entries.py": {"test_methods": 1},
    "parity/test_experts.py": {
        "test_a_line_of_ranks_leaves_a_mixture_out": 1,
        "test_stages_are_one_process_and_each_other": 3,
    },
    "parity/test_functional.py": {"test_parametrizations": 1},
    "parity/test_graphs.py": {
        "test_several_sharded_models_in_one_loss": 1,
        "test_one_model": 1,
        "test_one_module_twice_in_one_forward": 1,
        "test_one_module_twice_in_one_forward_under_reentrant_checkpoints": 1,
    },
    "parity/test_offload.py": {
        "test_state_at_rest_elsewhere_changes_no_bit": 1,
        "test_an_update_on_the_host_is_the_fused_step": 1,
    },
    "parity/test_outside.py": {
        "test_a_parameter_is_used_outside_its_module": 2,
        "test_a_parameter_is_used_outside_its_module_in_a_loop": 1,
        "test_a_parameter_is_used_outside_its_module_on_three_ranks": 1,
    },
    "parity/test_plain.py": {
        "test_loop": 2,
        "test_odd_sizes": 1,
        "test_model": 1,
        "test_fp32_with_sgd": 1,
        "test_tied": 1,
        "test_model_with_two_backwards": 1,
        "test_optimizers": 2,
        "test_float64": 1,
        "test_optimizers_given_later": 1,
        "test_three_micro_batches_equal_one_batch": 1,
        "test_ranks_take_different_paths": 1,
        "test_unused_on_one_of_three": 1,
        "test_unused_on_all_or_one_rank": 1,
        "test_reduction": 1,
    },
    "parity/test_release.py": {
        "test_it_changes_no_bit_at_any_stage_and_place": 1,
        "test_parameters_without_a_gradient": 1,
        "test_gradients_of_earlier_units_are_gone_while_backward_runs": 2,
    },
    "parity/test_residuals.py": {
        "test_each_method_trains": 0,
        "test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on": 2,
        "test_features_do_not_change_a_bit_between_stages": 2,
        "test_two_axes": 1,
        "test_stages_give_the_same_bits": 1,
        "test_what_is_left_goes_on_by_another_wire_or_plan": 1,
        "test_a_gradient_that_is_not_finite_does_not_stay": 2,
        "test_frozen_parameters": 1,
    },
    "parity/test_stages.py": {"test_pairs_at_other_worlds": 1},
    "parity/test_tensor.py": {"test_models_of_transformers": 1},
    "parity/test_tied.py": {"test_tied_weights_train_as_in_one_process": 1},
    "parity/test_user_hooks.py": {
        "test_hooks_on_units_inside_them_and_on_the_root": 1,
        "test_hooks_put_on_before_shard": 1,
        "test_hooks_on_saved_tensors": 1,
    },
    "parity/test_wires.py": {
        "test_a_wire_across_gives_the_same_bits_where_updates_are_cut_alike": 0,
        "test_stages_give_the_same_bits_by_the_same_wire": 1,
        "test_features_do_not_change_a_bit_between_stages": 2,
        "test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on": 1,
        "test_masters_are_never_what_was_decoded": 1,
        "test_features_beside_differences": 1,
        "test_all_ranks_compute_with_what_was_decoded": 2,
    },
    "parity/test_zoo.py": {"test_stages_are_the_same_bits_and_equal_one_process": 1},
    "planner/test_axes.py": {"test_resident_bytes_are_those_that_four_ranks_hold": 4},
    "planner/test_budget.py": {"test_without_a_batch_the_device_stays_within_its_budget": 1},
    "planner/test_choose.py": {
        "test_only_what_keeps_results_is_tried_unless_more_is_allowed": 0,
        "test_no_plan_on_one_gpu_is_foreseen_to_be_much_faster_than_the_choice": 1,
        "test_micro_batches_come_where_a_whole_batch_is_too_large": 0,
    },
    "planner/test_mesh_part.py": {
        "test_one_rank_of_256_on_a_fake_group_holds_what_was_predicted": 0,
        "test_predicted_is_what_the_fullest_stage_reports": 1,
    },
    "planner/test_peaks.py": {
        "test_peaks_of_the_largest_are_within_5_percent_of_those_measured_and_never_under": 0,
        "test_peaks_of_offloaded_runs_are_within_5_percent_of_those_measured_and_never_under": 0,
        "test_auto_fills_the_device_first_and_stays_within_its_budget": 1,
    },
    "planner/test_rests.py": {
        "test_resident_bytes_by_role_and_tier_are_exact": 1,
        "test_gradients_on_the_device_are_exact": 1,
        "test_windows_are_as_large_as_planned": 1,
    },
    "planner/test_wires.py": {"test_bytes_are_as_foreseen": 0, "test_bytes_of_what_is_kept_are_as_foreseen": 1},
    "replan/test_kept.py": {"test_matrices_of_owners_travel": 0, "test_other_worlds": 1},
    "replan/test_moving.py": {"test_every_element_arrives_in_messages_of_any_length": 2},
    "replan/test_park.py": {
        "test_a_run_that_was_parked_goes_on_in_every_bit": 0,
        "test_beside_tensor_parallelism": 1,
        "test_what_wires_have_left_out_goes_and_comes_too": 1,
        "test_in_front_of_the_first_of_several_micro_batches": 1,
        "test_a_wrong_moment_is_refused_and_the_run_goes_on": 6,
        "test_nothing_of_it_is_left": 2,
    },
    "replan/test_refused.py": {
        "test_a_rank_that_dies_on_the_way_leaves_the_others_their_model": 0,
        "test_a_failure_on_the_way_leaves_the_run_as_it_was": 1,
    },
    "step/test_handed_out.py": {"test_reading_between_backwards_changes_no_bit": 1},
    "step/test_inputs.py": {"test_a_forward_cannot_tell_aliases_from_its_inputs": 3},
    "step/test_keep_whole.py": {
        "test_training_is_the_same_with_and_without_small_parameters_kept_whole": 2,
        "test_checkpoints_load_with_another_keep_whole": 1,
    },
    "step/test_memory.py": {
        "test_resident_bytes_are_those_of_the_table": 2,
        "test_sums_over_micro_batches_are_those_that_the_planner_counts": 1,
        "test_each_unit_of_prefetch_costs_one_unit": 1,
    },
    "step/test_norms.py": {
        "test_stock_clipping_by_norm": 2,
        "test_stock_clipping_on_three_ranks": 1,
        "test_arithmetic_on_gradients_in_place": 1,
        "test_zero_grad_in_every_form": 1,
    },
    "step/test_schedule.py": {
        "test_lanes_are_fetched_updated_spilled_and_published_as_the_schedule_says": 8,
        "test_the_engine_does_what_the_schedule_says": 3,
    },
    "step/test_settling.py": {
        "test_settled_paths_change_no_bit": 3,
        "test_a_join_unsettles_every_rank": 1,
        "test_a_backward_that_one_rank_runs_twice_ends_in_an_error": 1,
        "test_static_settles_at_once_and_dynamic_never": 1,
        "test_after_five_equal_steps_nobody_waits": 2,
    },
    "step/test_traffic.py": {"test_a_step_sends_what_the_theory_says": 1},
    "step/test_traffic_by_axis.py": {"test_a_step_sends_what_its_schedule_says_along_each_axis": 1},
    "step/test_zero_grad.py": {"test_gradients_from_inside_no_sync_can_be_set_to_zero": 1},
    "test_api.py": {"test_500_steps_with_flat_memory": 0, "test_deleting_model_and_optimizer_frees_everything": 1},
    "test_ddp_wrapped.py": {
        "test_a_drop_in_under_ddp_equals_the_stock_optimizer_under_ddp_in_bits": 5,
        "test_torch_compile_around_a_ddp_or_a_plain_model_notices_nothing": 1,
    },
    "test_documents.py": {"test_it_goes_on_with_another_number_of_ranks_from_the_middle_of_an_epoch": 0},
    "test_ema.py": {
        "test_the_average_equals_torch_averaged_model": 1,
        "test_evaluating_the_average_in_the_middle_of_a_step_changes_nothing": 1,
        "test_the_average_is_of_the_masters_which_come_back_in_every_bit": 1,
    },
    "test_errors.py": {
        "test_one_rank_raising_in_mid_step_ends_all": 0,
        "test_a_rank_that_skips_a_collective_is_named_within_the_timeout": 1,
    },
    "test_examples.py": {"test_stage3_learns_and_saves_plain_weights": 0, "test_drop_in_learns": 0},
    "test_generate.py": {"test_after_training_steps_at_stage_3_with_and_without_a_cache": 1},
    "test_hosts.py": {"test_both_hosts_and_all_stages_end_with_the_same_bits": 0},
    "test_import.py": {"test_the_same_script_under_slurms_variables": 0, "test_the_same_script_under_torchrun": 0},
    "test_logging.py": {
        "test_the_users_own_logging_decides_how_it_looks": 0,
        "test_a_level_silences_it": 0,
        "test_a_run_prints_at_most_five_lines_from_rank_0": 0,
    },
    "test_lora.py": {"test_lora_equals_one_process": 1, "test_gradient_checkpointing_over_frozen_embeddings": 1},
    "test_master.py": {"test_a_bf16_model_gets_an_fp32_master_and_moments_by_default": 1},
    "test_penalty.py": {
        "test_penalties_in_the_loss_equal_one_process": 1,
        "test_a_penalty_beside_mean_loss_is_not_divided_by_the_items": 1,
        "test_a_penalty_counts_once_for_each_backward_it_is_in": 1,
    },
    "test_pool.py": {
        "test_a_killed_rank_is_named_and_replaced": 0,
        "test_a_timeout_shows_the_stacks_and_the_pool_recovers": 0,
    },
    "test_teardown.py": {"test_shard_train_and_let_go_five_times_leaves_nothing": 2},
    "tools/importers/test_import_tool.py": {
        "test_numbered_parameters_of_several_groups_need_names": 0,
        "test_a_deepspeed_checkpoint_resumes_with_its_moments": 1,
        "test_a_dcp_checkpoint_of_fsdp2_resumes_at_another_world": 1,
        "test_a_dcp_checkpoint_whose_optimizer_numbers_its_parameters_resumes": 1,
    },
    "tools/test_choose.py": {"test_micro_batches_are_told": 0},
    "tools/test_cli.py": {
        "test_plan_says_what_fits_beside_a_gpu": 0,
        "test_plan_says_when_activations_are_not_counted": 2,
        "test_plan_fits_a_terminal": 2,
    },
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
