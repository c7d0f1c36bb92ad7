"""Which tests of the contract suite run every day on which backend.

``make test-all`` runs the whole suite on every backend. A test that reaches code of a backend runs every day too, on
all of them. Such code holds nodes and reservations, starts and ends processes, carries requests and replies in their
order, packs values of every size, and keeps blocks. Each test that finds a fault of tests/contract/broken_backend.py
reaches code of a backend.

The rest of the suite tests the runtime above the contract, which is the same code for all backends. KINDS lists these
tests. A few of each kind run every day on all backends, and on the one of examples/backend_plugin, which runs no others
every day. The others run every day on the backends of WHOLE, and are ``exhaustive`` elsewhere; those of NIGHTLY are
exhaustive on all. A new test runs every day until it is listed. A name without parameters stands for the test with all
of its parameters.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ENGINES_NIGHTLY", "KINDS", "NIGHTLY", "WHOLE", "is_exhaustive"]

WHOLE: Final = ("inline",)
"""The targets on which the whole suite runs every day: the one without processes."""
NIGHTLY: Final = (
    "test_a_message_of_more_than_2_gib_arrives_whole",
    "test_large_messages_arrive_whole_and_can_be_written[260]",
    "test_references_stay_while_somebody_has_them",  # every day test_the_last_reference_frees_the_memory
    "test_memory_of_values_is_given_back",
    "test_a_process_has_its_whole_limit_to_start_and_no_more",  # test_a_start_ends_at_its_limit_and_leaves_nothing
    "test_nothing_outlives_a_script_that_ends_by",  # tests/integration/test_faults_script.py
)
"""Tests that are exhaustive on every target, for the memory or the time that they take."""
ENGINES_NIGHTLY: Final = (
    "test_a_completion_ends_with_the_token_that_completes_one_of_its_texts",
    "test_ids_that_stand_for_no_text_are_never_drawn",
)
"""Tests of the contract of engines that take long, and run every day on the engines of Podium's own alone."""


class Kind(NamedTuple):
    """Tests of one kind, none of which reaches the code of a backend in a way that others do not."""

    name: str
    everyday: tuple[str, ...]
    exhaustive: tuple[str, ...]


KINDS: Final = (
    Kind(
        "dispatch: the script splits arguments",
        everyday=(
            "test_broadcast_reaches_every_rank_and_gathers_in_rank_order",
            "test_scatter_gives_each_rank_its_own_and_only_calls_one",
        ),
        exhaustive=(
            "test_a_users_own_dispatch_collect_and_keywords",
            "test_the_script_chooses_ranks_and_the_endpoints_rules_hold_for_these",
            "test_ranks_that_cannot_be_chosen_are_named",
            "test_functions_are_shipped_with_every_dispatch_and_collect",
            "test_a_mesh_gives_rows_along_one_axis_and_collects_once_a_coordinate",
            "test_functions_are_shipped_to_all_ranks_or_one",
            "test_workers_declare_a_mesh_and_calls_go_by_it",
            "test_a_mesh_on_which_workers_do_not_agree_is_refused",
        ),
    ),
    Kind(
        "shards: the script splits and joins rows",
        everyday=("test_batches_come_back_as_they_were[[3, 1, 4, 1, 5, 9, 2]]",),
        exhaustive=(
            "test_rows_are_split_evenly_and_joined_in_order",
            "test_batches_come_back_as_they_were",
            "test_every_kind_of_rows_can_be_sharded",
            "test_arrays_and_own_rows_stay_what_they_are",
            "test_tokens_are_balanced_over_the_ranks",
            "test_padding_repeats_rows_and_concat_takes_them_off",
            "test_padding_is_chosen_at_the_call",
            "test_what_splits_no_rows_cannot_be_padded",
            "test_single_values_beside_rows_reach_every_rank_and_come_back_as_one",
            "test_rows_of_one_group_stay_together",
            "test_named_arguments_are_split_and_the_others_broadcast",
            "test_columns_that_workers_add_are_in_row_order",
            "test_the_callers_batch_is_not_changed",
        ),
    ),
    Kind(
        "collect: the script makes one of the results",
        everyday=("test_first_nothing_and_reduce",),
        exhaustive=("test_means_weighted_by_rows_and_tokens_are_those_of_the_whole",),
    ),
    Kind(
        "refusals: the script refuses a call before it is sent, or a result after it came",
        everyday=("test_wrong_arguments_are_named_before_anything_is_sent[echo---0]",),
        exhaustive=(
            "test_wrong_arguments_are_named_before_anything_is_sent",
            "test_what_cannot_be_sharded_is_named",
            "test_a_users_dispatch_that_splits_wrongly_is_named",
            "test_results_that_do_not_fit_together_are_named_with_their_ranks",
            "test_results_without_rows_are_named",
            "test_what_is_no_endpoint_is_named_with_what_there_is",
            "test_an_endpoint_tells_its_signature_and_its_help",
            "test_a_call_in_the_place_of_its_result_says_how_to_pass_it",
            "test_what_stays_in_the_controller_says_how_to_pass_it",
            "test_a_deadline_is_a_positive_number",
            "test_what_the_runtime_decides_cannot_be_set",
            "test_only_bound_workers_are_started",
        ),
    ),
    Kind(
        "values: one codec pickles for all backends; what a backend sees of a value is buffers, small and large",
        everyday=(
            "test_tensors_come_back_equal[empty]",
            "test_tensors_come_back_equal[scalar]",
            "test_tensors_come_back_equal[large]",
            "test_tensors_of_every_kind_come_back_equal[empty]",
            "test_tensors_of_every_kind_come_back_equal[scalar]",
            "test_tensors_of_every_kind_come_back_equal[large]",
            "test_an_exception_arrives_whatever_its_class_does[does not unpickle here]",
        ),
        exhaustive=(
            "test_tensors_come_back_equal",
            "test_tensors_of_every_kind_come_back_equal",
            "test_special_tensors_keep_their_nature",
            "test_a_state_dict_keeps_tied_weights_tied",
            "test_records_batches_and_functions",
            "test_what_does_not_pickle_is_named_by_its_path",
            "test_an_exception_arrives_whatever_its_class_does",
            "test_workers_made_by_value_are_started_too",
        ),
    ),
    Kind(
        "references: rows of references are the script's; a backend keeps and reads blocks",
        everyday=("test_shards_balanced_shards_and_padding",),
        exhaustive=(
            "test_using_one_as_a_tensor_says_what_to_do",
            "test_row_operations_on_references_and_mixed_batches",
            "test_a_call_as_an_argument_passes_references_on",
            "test_references_go_to_and_come_from_chosen_ranks",
            "test_a_group_can_return_references_by_default",
        ),
    ),
    Kind(
        "waiting and cancelling: a backend delivers replies, and carries the request to cancel as any other",
        everyday=(
            "test_a_call_can_be_awaited_and_raises_what_it_raised",
            "test_the_first_calls_to_end_can_be_waited_for",
            "test_a_running_async_endpoint_is_cancelled",
        ),
        exhaustive=(
            "test_the_event_loop_goes_on_while_a_call_is_awaited",
            "test_a_time_out_of_asyncio_cancels_the_call_unless_it_is_shielded",
            "test_a_debugger_without_a_terminal_says_where_there_is_one",
            "test_the_synchronous_api_works_inside_a_running_loop",
            "test_what_an_endpoint_returns_undone_is_waited_for",
            "test_a_queued_call_is_dropped",
            "test_a_running_sync_endpoint_goes_on_unheard",
        ),
    ),
    Kind(
        "deadlines: the script measures them, and asks processes that are busy for their stacks",
        everyday=(
            "test_a_deadline_names_the_ranks_the_method_and_the_stack",
            "test_a_deadline_holds_where_calls_run_at_once_too",
        ),
        exhaustive=(
            "test_a_deadline_cancels_an_async_endpoint",
            "test_behind_a_stuck_call_the_deadline_says_who_is_busy",
            "test_a_groups_deadline_is_the_default_of_its_calls",
            "test_a_function_and_chosen_ranks_keep_a_deadline_of_their_own",
        ),
    ),
    Kind(
        "calls as arguments: the script sends the consumer when its producer has ended",
        everyday=("test_an_unfinished_call_is_an_argument_and_order_holds_behind_it",),
        exhaustive=(
            "test_a_finished_call_is_an_argument",
            "test_calls_in_lists_tuples_and_dicts_are_arguments",
            "test_calls_are_values_for_each_rank",
            "test_a_call_in_a_list_that_fails_fails_its_consumer",
            "test_calls_can_form_a_chain",
            "test_the_failure_of_a_producer_fails_its_consumer_and_not_the_submission",
            "test_a_slow_producer_does_not_stretch_its_consumers_deadline",
            "test_a_consumer_that_is_cancelled_lets_those_behind_it_go",
            "test_wrong_arguments_behind_an_unfinished_call_fail_the_call",
        ),
    ),
    Kind(
        "errors and workers: one class runs the endpoints in every process",
        everyday=("test_leaving_python_in_an_endpoint_is_an_error_of_it",),
        exhaustive=(
            "test_an_error_names_method_and_rank_and_brings_its_traceback",
            "test_a_constructor_that_raises_names_its_rank_and_leaves_nothing",
            "test_a_group_whose_ranks_all_raise_alike_stays_usable",
            "test_a_worker_inside_a_worker_is_an_ordinary_object",
            "test_debug_records_frame_construction_and_calls",
            "test_chosen_calls_of_chosen_ranks_are_recorded",
            "test_named_meshes_are_in_the_context",
            "test_seeds_differ_by_rank_and_follow_from_the_groups",
            "test_inherited_endpoints_are_endpoints_and_overridden_ones_are_what_they_became",
        ),
    ),
    Kind(
        "handles: a worker's call goes through the script, as the script's own",
        everyday=(
            "test_many_calls_are_awaited_at_once_and_each_callers_order_is_kept",
            "test_references_go_and_come",
        ),
        exhaustive=(
            "test_a_worker_calls_with_the_endpoints_own_dispatch_and_collect",
            "test_a_handle_comes_back_as_the_one_that_was_given",
            "test_errors_are_those_of_the_call",
            "test_an_argument_that_the_script_cannot_read_is_an_error_of_its_call",
            "test_deadlines_hold",
            "test_the_group_stays_with_the_script",
            "test_a_worker_that_would_wait_for_itself_is_refused",
            "test_a_caller_that_dies_takes_its_calls_with_it",
            "test_a_group_that_restarts_is_reached_again",
        ),
    ),
    Kind(
        "pools and groups: the script counts slots and names; a backend holds places and starts processes",
        everyday=("test_groups_run_on_parts_of_a_pool_and_share_it",),
        exhaustive=(
            "test_replicas_are_independent",
            "test_sizes_may_be_single_numbers",
            "test_accelerators_are_chosen_by_kind",
            "test_a_second_group_inherits_the_environment_that_is_chosen",
            "test_joined_pools_are_released_together_or_not_at_all",
            "test_a_pool_has_at_least_one_slot_a_node",
            "test_a_released_pool_cannot_be_used",
            "test_names",
            "test_a_name_that_cannot_name_a_log_file_is_refused",
            "test_groups_started_at_once_get_names_of_their_own",
        ),
    ),
    Kind(
        "colocation: workers that share a process are requests to a process that runs",
        everyday=("test_colocated_workers_reach_each_other_as_plain_objects",),
        exhaustive=(
            "test_restart_makes_all_colocated_workers_anew",
            "test_colocated_workers_can_be_declared",
            "test_the_name_of_a_colocated_group_is_kept",
            "test_closing_a_colocated_worker_does_not_wait_for_its_sibling",
            "test_a_worker_is_added_to_processes_that_run",
            "test_a_start_into_processes_that_fails_leaves_nothing_there",
        ),
    ),
    Kind(
        "loads and ends: many, large and long calls, and what starts and ends leave; the faults that show rarely",
        everyday=(
            "test_calls_at_once_run_once_and_have_replies_of_their_own",
            "test_a_restart_repeats_no_call",
            "test_each_end_has_its_cause_and_last_words",
        ),
        exhaustive=(
            "test_calls_of_one_concurrent_endpoint_overlap",
            "test_large_and_small_calls_keep_their_order_and_run_once",
            "test_a_call_that_takes_long_runs_once",
            "test_large_messages_arrive_whole_and_can_be_written",
            "test_messages_of_many_parts_arrive_whole",
            "test_what_a_worker_or_the_caller_keeps_stays_as_it_was",
            "test_a_stopped_process_holds_up_nobody",
            "test_an_argument_for_many_processes_is_stored_once",
            "test_memory_of_values_is_given_back",
            "test_restarts_leave_nothing_behind",
            "test_references_stay_while_somebody_has_them",
            "test_a_process_has_its_whole_limit_to_start_and_no_more",
            "test_a_start_that_hangs_does_not_hold_up_another",
            "test_variables_are_those_of_the_group_and_of_every_rank",
            "test_each_start_and_restart_is_where_the_controller_is_then",
            "test_an_end_is_heard_within_seconds",
            "test_threads_may_kill_at_once",
            "test_whatever_a_process_started_ends_when_it",
            "test_closing_from_threads_and_with_calls_in_flight",
            "test_nothing_outlives_a_script_that_ends_by",
        ),
    ),
    Kind(
        "collectives: torch.distributed is the same everywhere; a backend says where ranks meet",
        everyday=("test_collectives_work_in_constructors_and_endpoints",),
        exhaustive=(
            "test_collectives_of_one_rank_work_everywhere",
            "test_colocated_workers_share_the_process_group_and_make_subgroups",
            "test_a_rank_that_fails_frees_its_siblings_from_a_collective",
            "test_what_a_failure_broke_does_not_reach_the_workers_of_a_restart",
        ),
    ),
)

_EVERYDAY: Final = frozenset(name for kind in KINDS for name in kind.everyday)
_EXHAUSTIVE: Final = frozenset(name for kind in KINDS for name in kind.exhaustive)


def is_exhaustive(test: str, target: str, parameters: str = "") -> bool:
    """Return whether ``make test`` leaves a test of the suite out on ``target``, which a ``Target`` prints.

    ``parameters`` are those of the test alone, as pytest names them.
    """
    if test in NIGHTLY or f"{test}[{parameters}]" in NIGHTLY:
        return True
    if target in WHOLE or f"{test}[{parameters}]" in _EVERYDAY:
        return False
    return test in _EXHAUSTIVE
