"""Which tests run only in `make test-all`; `make test` runs all others: each verb, contract and attack once.

A test is here for its processor time (costs.py) if something cheaper shows the same mechanism, or because it
needs root.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# A folder, a file, or a test of a file -> why it is not in `make test`.
SLOW = {
    # Whole jobs on simulated hosts: 6 to 30 s of processor time each, as root.
    "lab/product": "whole jobs on namespace nodes; each verb runs on process nodes in tests/cli",
    "lab/test_lab_boot.py": "namespace nodes",
    "lab/test_lab_confinement.py": "namespace nodes",
    "lab/test_lab_deadline.py": "namespace nodes",
    "lab/test_lab_ends.py": "namespace nodes",
    "lab/test_lab_firewall.py": "namespace nodes",
    "lab/test_lab_guest.py": "namespace nodes",
    "lab/test_lab_image.py": "namespace nodes",
    "lab/test_lab_isolation.py": "namespace nodes",
    "lab/test_lab_link.py": "namespace nodes",
    "lab/test_lab_metadata.py": "namespace nodes",
    "lab/test_lab_network.py": "namespace nodes",
    "lab/test_lab_rootless.py": "namespace nodes",
    "lab/test_lab_routes.py": "namespace nodes",
    "lab/test_lab_s3.py": "namespace nodes",
    "lab/test_second_user.py": "needs root and a second user",
    "lab/test_late_messages.py": "the simulator's SSH server compared with OpenSSH's",
    "lab/test_sim_lifecycle.py::test_64_nodes_have_their_own_addresses_and_homes": "8 s",
    "lab/test_sim_node_session.py": "the simulator's nodes as processes; tests/cli uses them",
    "lab/test_sim_power.py": "the simulator's nodes as processes; tests/cli stops and starts them",
    "lab/test_sim_sessions.py": "the simulator's nodes as processes; tests/cli connects to them",
    "lab/test_sim_timing.py": "each test waits for the states of a simulator of its own",
    # The command line: whole clusters, killed or short of something, in many variants.
    "cli/test_agent_version.py": "two agents; tests/node/test_version.py has the rules",
    "cli/test_concurrency.py": "46 kills of `up`; tests/cli/test_interrupts.py has interrupts of it",
    "cli/test_deadline.py": "tests/node/test_notices.py has the deadline",
    "cli/test_init.py::test_copy_of_an_example_trains_and_passes_its_tests": "40 s",
    "cli/test_killed_agents.py": "tests/node/test_gang.py has killed agents",
    "cli/test_login_sessions.py": "tests/cli/test_credentials.py has each kind of credentials",
    "cli/test_lost_state.py": "tests/unit/test_state.py has the files",
    "cli/test_node_ranks.py": "5 to 11 s each; tests/unit/test_rank_assignment.py has the rule",
    "cli/test_packaging.py": "30 s: a wheel and its environment",
    "cli/test_paused_client.py": "6 s each; tests/unit/test_follow_liveness.py has the rule",
    "cli/test_pull_nodes.py": "large files; tests/node/test_pull_continues.py has the transfer",
    "cli/test_remains.py": "2 s each; tests/cli/test_teardown.py has what is removed",
    "cli/test_results_kept.py": "jobs; tests/node/test_new_files.py has which results are listed",
    "cli/test_resume_calls.py": "`resume`, killed at each call; tests/cli/test_scarcity.py has lost answers",
    "cli/test_slow_boots.py": "waits; tests/unit/test_wait_ready.py has the rule",
    "cli/test_stacks.py": "7 s each; tests/node/test_stall.py has the stacks",
    "cli/test_start_up.py": "what each verb imports, in a new process each",
    "cli/test_stopped_nodes.py": "7 s each; tests/unit/test_ended_nodes.py has the rule",
    "cli/test_stragglers.py": "tests/node/test_straggler_detection.py has the rule",
    "cli/test_teardown_files.py": "2 s each; tests/unit/test_state.py has the files",
    "cli/test_two_launches.py": "4 s each; tests/node/test_project_lock.py has the lock",
    # Jobs of torch; test_torchrun_across_nodes_trains_and_names_the_failing_rank remains.
    "cli/test_export_slurm.py::test_arguments_and_variables_reach_the_ranks_through_torchrun": "torch",
    "cli/test_launch.py::test_modules_of_the_project_do_not_replace_those_of_the_launcher": "torch",
    "cli/test_launch.py::test_shell_script_runs_once_per_rank": "torch",
    "cli/test_logs_and_jobs.py::test_following_does_not_end_a_job_that_restarts": "torch",
    "cli/test_training_status.py::test_cancelled_training_resumes_from_its_snapshot": "torch",
    "node/test_straggler_detection.py::test_slow_rank_of_a_real_training_is_named": "torch",
    # The agent: gangs of real processes.
    "node/test_abandoned_ranks.py": "tests/node/test_gang.py has ranks without an agent",
    "node/test_copies.py": "boto3 in a process of its own, 2 s each",
    "node/test_gang_early_exit.py": "gangs; tests/unit/test_decision.py has the verdicts",
    "node/test_gang_restarts.py": "gangs; tests/node/test_stall.py has a restart",
    "node/test_guard_watch.py": "waits of 3 s; tests/node/test_gang.py has a killed supervisor",
    "node/test_handover.py": "gangs; tests/node/test_spread.py sends snapshots too",
    "node/test_huge_lines.py": "1 GB of output; tests/unit/test_lines.py has the limits",
    "node/test_idle_check.py": "needs root and namespaces",
    "node/test_killed_launchers.py": "tests/node/test_gang.py has a killed launcher",
    "node/test_laptop_silence.py": "waits",
    "node/test_orphans.py": "tests/node/test_kill.py has daemons",
    "node/test_replaced.py": "tests/node/test_new_files.py has which results are listed",
    "node/test_shared_by_default.py": "gangs; tests/node/test_spread.py copies between nodes too",
    "node/test_ranks_alone.py": "2 s each",
    "node/test_stall.py::"
    "test_hang_of_a_real_training_is_explained_and_dumps_are_in_the_folder_of_the_job": "torch, 26 s each",
    "node/test_sync_star.py": "several nodes; tests/node/test_sync_node.py has each kind of file",
    "node/test_sync_interrupted.py": "several nodes; tests/node/test_pull_continues.py has a broken transfer",
    "node/test_tools.py": "py-spy is sent to real nodes",
    # Runs of torch, 5 to 12 s each. The numeric properties are in those that remain.
    "examples": "torch runs of the examples",
    "train/test_train_bench.py": "a benchmark",
    "train/test_train_launch.py": "the tests' own support code",
    "train/test_train_loader.py": "worker processes",
    "train/test_train_loggers.py": "runs with a stand-in for wandb",
    "train/test_train_options.py": "runs of the trainer, one for each option",
    "train/test_train_own_script.py": "runs of the trainer",
    "train/test_train_preempt.py": "runs that are ended at any time",
    "train/test_train_resume.py": "runs that are killed; tests/train/test_train_numerics.py has resumption",
    "train/test_train_run.py": "runs of the trainer as users start it",
    "train/test_train_sharded.py": "killed writers; tests/train/test_train_snapshot.py has damaged files",
    "train/test_train_smddp.py": "torch runs of scripts for SageMaker",
    # The tests' own support.
    "unit/test_collection.py::test_collection_imports_torch_only_for_tests_of_torch": "collects all tests",
    "unit/test_simulators_of_killed_tests.py::test_interrupted_run_leaves_no_process": "three runs of tests",
}

# Files of which `make test` runs each test function with its first parameters only: the others are variants,
# each of which starts processes. Attacks by a node all run (pull_attacks, sync_attacks, malicious_agent).
FIRST_PARAMETERS = {
    "cli/test_credentials.py",
    "cli/test_doctor.py",
    "cli/test_down.py",
    "cli/test_efa.py",
    "cli/test_extra_tags.py",
    "cli/test_fuzz_command_line.py",
    "cli/test_home.py",
    "cli/test_host_keys.py",
    "cli/test_images.py",
    "cli/test_interrupts.py",
    "cli/test_launch.py",
    "cli/test_log_selection.py",
    "cli/test_logs_and_jobs.py",
    "cli/test_malformed_answers.py",
    "cli/test_mfa.py",
    "cli/test_networks.py",
    "cli/test_numbers.py",
    "cli/test_organization.py",
    "cli/test_own_flags.py",
    "cli/test_ownership.py",
    "cli/test_placing.py",
    "cli/test_prices.py",
    "cli/test_regions_searched.py",
    "cli/test_reservations.py",
    "cli/test_run.py",
    "cli/test_scarcity.py",
    "cli/test_setup_commands.py",
    "cli/test_sim_verbs.py",
    "cli/test_tags.py",
    "cli/test_teardown.py",
    "cli/test_up.py",
    "cli/test_unwritable.py",
    "cli/test_variables.py",
    "cli/test_what_is_sent.py",
    "lab/test_sim_control.py",
    "node/test_agent_session.py",
    "node/test_bad_records.py",
    "node/test_gang.py",
    "node/test_gang_joining.py",
    "node/test_gang_strangers.py",
    "node/test_kill.py",
    "node/test_left_out.py",
    "node/test_new_files.py",
    "node/test_probe.py",
    "node/test_project_lock.py",
    "node/test_pull_continues.py",
    "node/test_rank_logs.py",
    "node/test_setup.py",
    "node/test_spread.py",
    "node/test_stall.py",
    "node/test_straggler_detection.py",
    "node/test_sync_node.py",
    "train/test_train_fsdp.py",
    "train/test_train_modes.py",
    "train/test_train_pipeline.py",
}


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Add the marker `slow` according to the tables; raise UsageError for an entry that names nothing."""
    if wrong := missing([*SLOW, *FIRST_PARAMETERS]):
        raise pytest.UsageError(f"tests/support/tiers.py names what does not exist: {', '.join(wrong)}")
    seen = set()
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        file = item.path.relative_to(TESTS)
        function = f"{file}::{getattr(item, 'originalname', item.name)}"
        places = {function, *map(str, [file, *file.parents])}
        if places & SLOW.keys() or (function in seen and str(file) in FIRST_PARAMETERS):
            item.add_marker(pytest.mark.slow)
        seen.add(function)


def missing(places: Iterable[str]) -> list[str]:
    """Return the places that name no folder, file or test function."""
    return sorted(place for place in places if not _exists(*place.partition("::")[::2]))


def _exists(file: str, function: str) -> bool:
    path = TESTS / file
    return path.exists() and (not function or f"\ndef {function}(" in path.read_text(encoding="utf-8"))
