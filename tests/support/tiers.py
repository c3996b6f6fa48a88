"""Which tests run only in `make test-all`; `make test` runs all others: each verb, contract and attack once.

A test is here for its processor time if something cheaper shows the same mechanism, or because it
needs root.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# A folder, a file, or a test of a file -> why it is not in `make test`.
SLOW = {
    # Whole jobs on simulated hosts: 6 to 30 s of processor time each, as root.
    "lab/product": "whole jobs on namespace nodes; each verb runs on process nodes in tests/cli",
    "lab/test_lab_*.py": "namespace nodes",
    "lab/test_second_user.py": "needs root and a second user",
    "lab/test_sim_control.py::test_reused_pid_is_not_mistaken_for_the_server": "a simulator of its own",
    "lab/test_sim_node_session.py": "the simulator's nodes as processes; tests/cli uses them",
    "lab/test_sim_sessions.py": "the simulator's nodes as processes; tests/cli connects to them",
    # The command line: whole clusters, killed or short of something, in many variants.
    "cli/test_logs_and_jobs.py::"
    "test_job_of_another_agent_version_is_not_modified": "4 s; tests/node/test_version.py has the rules",
    "cli/test_concurrency.py": "2 to 3 s each: `up` killed, or beside `down`, at each call of the journal",
    "cli/test_deadline.py": "waits; tests/node/test_notices.py has the deadline on the nodes",
    "cli/test_init.py::test_copy_of_an_example_trains_and_passes_its_tests": "15 s of torch",
    "cli/test_login_sessions.py": "SSO needs new processes; tests/cli/test_credentials.py has other sources",
    "cli/test_lost_state.py": "waits for boots; tests/cli/test_down.py has a lost folder",
    "cli/test_packaging.py": "30 s: a wheel and its environment",
    "cli/test_preflight_verb.py::test_bandwidth_is_measured": "torch; tests/unit/test_bandwidth.py",
    "cli/test_remains.py": "2 s each; tests/cli/test_regions_searched.py has addresses that remain",
    "cli/test_results_kept.py": "jobs; tests/node/test_new_files.py has which results are listed",
    "cli/test_report_in_a_browser.py": "Chromium; tests/unit/test_report_page.py has the page",
    "cli/test_resume_calls.py": "4 s each; tests/cli/test_rollback.py has the same failures of `up`",
    "cli/test_screens.py::test_training_of_the_example_in_one_command": "10 s; the other job is of the shell",
    "cli/test_slow_boots.py": "waits; tests/unit/test_wait_ready.py has limits and defective GPUs",
    "cli/test_stacks.py": "7 s each; tests/node/test_stall.py has the stacks",
    "cli/test_stopped_nodes.py": "7 s each; tests/unit/test_overdue.py has the rule",
    "cli/test_teardown_files.py": "waits; tests/unit/test_state.py has the files",
    # Single tests of the command line, 1 to 12 s each: most create clusters.
    "cli/test_dependencies.py": "`make lowest` runs it, too",
    "cli/test_efa.py::"
    "test_missing_devices_are_a_warning_unless_they_are_required": "test_missing_devices_fail_if_required",
    "cli/test_home.py::test_simulator_folders_and_log_are_private": "2 s; other links in the folder remain",
    "cli/test_iam_policies.py::test_operator_may_replace_a_node": "7 s; other calls of the operator remain",
    "cli/test_interrupts.py::test_detaching_from_run_keeps_the_cluster": "detaching from `launch` remains",
    "cli/test_mfa.py::test_damaged_cache_counts_as_empty": "2 s; the error is that without a cache",
    "cli/test_organization.py::test_denied_region_where_this_computer_has_a_cluster_is_not_left_out": "2 s",
    "cli/test_reservations.py::test_up_after_down_waits_for_the_clean_up": "waits",
    # 3 to 25 s each.
    "cli/test_malformed_answers.py::"
    "test_teardown_reports_answers_that_it_cannot_use": "answers of calls that create remain",
    "cli/test_what_is_sent.py::test_bytes_that_are_not_utf_8_are_carried": "test_sync_node.py has such names",
    "train/test_train_pipeline.py::test_sweep_times_every_mode_and_claims_no_speed_on_a_cpu": "a benchmark",
    # Jobs of torch; test_torchrun_across_nodes_trains_and_names_the_failing_rank remains.
    "cli/test_export_slurm.py::test_arguments_and_variables_reach_the_ranks_through_torchrun": "torch",
    "cli/test_launch.py::test_modules_of_the_project_do_not_replace_those_of_the_launcher": "torch",
    "cli/test_launch.py::"
    "test_shell_script_runs_once_per_rank_and_is_followed_when_torchrun_restarts_it": "torch",
    # The agent: gangs of real processes.
    "node/test_abandoned_ranks.py": "waits; tests/node/test_kill.py has ranks without an agent",
    "node/test_notifications.py::test_delivery_that_never_ends_delays_no_job_and_the_node_ends": "waits 20 s",
    "node/test_copies.py": "boto3 in a process of its own, 2 s each",
    "node/test_sync_node.py::test_second_sync_waits_for_the_first_one_and_then_refuses": "waits 20 s",
    "node/test_data_from_s3.py::test_bucket_in_another_region_is_named": "boto3 in a process of its own",
    "node/test_flight_recorder.py::test_analyzer_of_torch_names_the_rank": "torch; what it gets remains",
    "unit/test_collection.py::test_collection_imports_torch_only_for_tests_of_torch": "4 s",
    "unit/test_report_page.py::test_files_of_tensorboard_are_read": "torch; event files of our own remain",
    "node/test_data_from_s3.py::test_object_that_is_refused_or_cut_short_is_named": "2 s of boto3 a case",
    "node/test_data_from_s3.py::test_prefix_without_objects_is_refused": "boto3 in a process of its own",
    "node/test_checkpoint_origins.py": "gangs; tests/unit/test_checkpoints.py has which ones are whole",
    "node/test_data_from_s3.py::test_node_without_a_role_is_reported": "boto3 in a process of its own",
    "node/test_straggler_detection.py::"
    "test_straggler_is_named_on_all_nodes_and_noted_once_in_its_log_until_it_catches_up": "gangs",
    "node/test_containers.py::test_setup_runs_in_the_container_once_for_each_image": "ranks in them remain",
    "node/test_kill.py::test_lingering_launcher_is_ended_and_the_job_succeeds": "waits",
    "node/test_notices.py::test_job_follows_a_deadline_that_is_moved": "waits; when it is announced remains",
    "node/test_preflight.py::test_comparison_is_left_out_on_request": "gangs; what is compared remains",
    "node/test_shared.py::test_shared_files_are_not_copied_between_nodes": "gangs",
    "node/test_shared.py::test_results_in_a_shared_folder_are_those_of_the_first_node": "gangs",
    "node/test_shared.py::test_first_node_that_was_replaced_is_mounted_anew": "the first mounts remain",
    "node/test_stall.py::"
    "test_stall_that_is_left_alone_is_kept_on_all_nodes_until_a_rank_does_something": "gangs",
    "node/test_stall.py::test_all_nodes_are_unused_after_the_job": "waits; test_ending.py has the rule",
    "node/test_spread.py::test_every_shared_file_is_on_all_nodes_in_its_newest_version": "gangs",
    "node/test_spread.py::test_resumed_job_begins_with_the_newest_valid_snapshot": "a restart remains",
    "node/test_spread.py::test_node_that_cannot_write_is_named_and_no_rank_starts": "gangs",
    "unit/test_golden_requests.py::"
    "test_requests_of_other_types_are_those_of_the_golden_file": "those of each kind of account remain",
    "node/test_spread.py::test_newest_snapshot_is_sent_to_the_first_node_that_stays": "gangs",
    "node/test_spread.py::test_snapshot_that_is_not_taken_is_named": "gangs",
    "node/test_huge_lines.py": "256 MB of output",
    "node/test_units.py::test_unused_node_ends": "needs root and namespaces",
    "node/test_shared_by_default.py": "gangs; tests/node/test_spread.py copies between nodes too",
    "node/test_straggler_detection.py::test_node_that_trains_alone_is_named_once": "8 s",
    "node/test_sync_star.py": "several nodes; tests/node/test_sync_node.py has each kind of file",
    # Runs of torch, 5 to 12 s each. The numeric properties are in those that remain.
    "examples": "torch runs of the examples",
    "train/test_train_loader.py": "worker processes",
    "train/test_train_loggers.py": "runs with a stand-in for wandb",
    "train/test_train_options.py": "runs of the trainer, one for each option",
    "train/test_train_own_script.py": "runs of the trainer",
    "train/test_train_preempt.py": "runs that are ended at any time",
    "train/test_train_resume.py": "runs that are killed; tests/train/test_train_numerics.py has resumption",
    "train/test_train_run.py": "runs of the trainer as users start it",
    "train/test_train_sharded.py": "killed writers; tests/train/test_train_snapshot.py has damaged files",
    "train/test_train_smddp.py": "torch runs of scripts for SageMaker",
}

# Files of which `make test` runs each test function with its first parameters only: the others are variants,
# each of which starts processes. Attacks by a node all run (malicious_agent, receive, sync_attacks).
FIRST_PARAMETERS = {
    f"{folder}/test_{name}.py"
    for folder, names in {
        "cli": "credentials fuzz_command_line home host_keys interrupts launch malformed_answers mfa "
        "own_flags regions_searched reservations setup_commands tags teardown up what_is_sent",
        "lab": "sim_control",
        "node": "kill probe project_lock pull_continues setup spread",
    }.items()
    for name in names.split()
}


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Add the marker `slow` according to the tables; raise UsageError for an entry that names nothing."""
    if wrong := missing([*SLOW, *FIRST_PARAMETERS]):
        raise pytest.UsageError(f"tests/support/tiers.py names what does not exist: {', '.join(wrong)}")
    seen = set()
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        file = item.path.relative_to(TESTS).as_posix()
        function = f"{file}::{getattr(item, 'originalname', item.name)}"
        if function in SLOW or is_slow(item.path) or (function in seen and file in FIRST_PARAMETERS):
            item.add_marker(pytest.mark.slow)
        seen.add(function)


@functools.cache
def is_slow(path: Path) -> bool:
    """Return whether all tests of a file or a folder are slow."""
    places = (place.relative_to(TESTS) for place in (path, *path.parents) if TESTS in place.parents)
    return any(fnmatch.fnmatch(place.as_posix(), entry) for place in places for entry in SLOW)


def missing(places: Iterable[str]) -> list[str]:
    """Return the places that name no folder, file or test function."""
    return sorted(place for place in places if not _exists(*place.partition("::")[::2]))


def _exists(file: str, function: str) -> bool:
    found = list(TESTS.glob(file))
    return bool(found) and (not function or f"\ndef {function}(" in found[0].read_text(encoding="utf-8"))
