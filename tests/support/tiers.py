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
    "lab/test_lab_deadline.py": "namespace nodes",
    "lab/test_lab_ends.py": "namespace nodes",
    "lab/test_lab_firewall.py": "namespace nodes",
    "lab/test_lab_guest.py": "namespace nodes",
    "lab/test_lab_image.py": "namespace nodes",
    "lab/test_lab_isolation.py": "namespace nodes",
    "lab/test_lab_link.py": "namespace nodes",
    "lab/test_lab_metadata.py": "namespace nodes",
    "lab/test_lab_network.py": "namespace nodes",
    "lab/test_lab_routes.py": "namespace nodes",
    "lab/test_lab_s3.py": "namespace nodes",
    "lab/test_second_user.py": "needs root and a second user",
    "lab/test_late_messages.py": "the simulator's SSH server; tests/cli connects to it",
    "lab/test_sim_addresses.py::test_lab_node_responds_on_its_elastic_ip": "namespace nodes",
    "lab/test_sim_control.py::test_reused_pid_is_not_mistaken_for_the_server": "a simulator of its own",
    "lab/test_sim_control.py::test_ssh_port_option": "a simulator of its own",
    "lab/test_sim_efa.py::test_node_shows_an_efa_device_for_each_interface": "namespace nodes",
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
    # Single tests of the command line, 1 to 12 s each: most create clusters.
    "cli/test_credentials.py::"
    "test_end_of_the_environments_keys_is_shown": "3 s; tests/cli/test_mfa.py shows the end of a session",
    "cli/test_credentials.py::"
    "test_endpoint_that_is_not_a_url_is_a_usage_error": "4 s; other invalid profiles remain",
    "cli/test_dependencies.py": "`make lowest` runs it, too",
    "cli/test_efa.py::"
    "test_address_that_was_allocated_twice_is_released": "tests/cli/test_rollback.py has an unlisted one",
    "cli/test_efa.py::"
    "test_calls_for_addresses_are_two_per_node": "3 s; tests/unit/test_golden_requests.py has the calls",
    "cli/test_efa.py::"
    "test_down_on_another_computer_releases_elastic_ips": "tests/cli/test_regions_searched.py releases some",
    "cli/test_efa.py::"
    "test_duplicate_placement_group_after_a_lost_answer_is_used": "tests/cli/test_up.py has it for groups",
    "cli/test_efa.py::test_launch_that_fails_later_leaves_no_group_or_address": "tests/cli/test_rollback.py",
    "cli/test_efa.py::test_leftover_address_is_listed_with_its_price": "tests/unit/test_leftovers.py",
    "cli/test_efa.py::"
    "test_missing_devices_are_a_warning": "the same check as test_missing_devices_fail_if_required",
    "cli/test_efa.py::test_missing_devices_fail_if_required_where_gpus_may_be_missing": "the same check",
    "cli/test_efa.py::"
    "test_next_zone_uses_the_same_group_and_addresses": "tests/cli/test_placing.py has the next zone",
    "cli/test_efa.py::test_placement_group_in_the_file": "tests/unit/test_golden_requests.py has the group",
    "cli/test_efa.py::test_placement_group_that_is_not_known_yet": "tests/cli/test_up.py has it for groups",
    "cli/test_efa.py::test_private_nodes_need_no_elastic_ip": "tests/unit/test_golden_requests.py",
    "cli/test_efa.py::"
    "test_repeated_up_expects_what_the_cluster_was_launched_with": "tests/cli/test_up.py has the second `up`",
    "cli/test_efa.py::"
    "test_resource_in_use_is_removed_later": "tests/cli/test_down.py waits for a group in use",
    "cli/test_efa.py::test_single_card_keeps_its_public_address": "tests/unit/test_golden_requests.py",
    "cli/test_host_keys.py::test_reboot_keeps_the_key": "2 s; tests/node/test_host_key_script.py",
    "cli/test_host_keys.py::test_two_commands_complete_the_keys_together": "the completion by one remains",
    "cli/test_host_keys.py::test_unreachable_node_gets_its_key_later": "a killed `up` is completed, too",
    "cli/test_images.py::"
    "test_another_image_is_named_for_a_type_that_the_default_one_does_not_list": "other messages",
    "cli/test_images.py::test_entry_of_the_description_includes_its_variants": "other descriptions",
    "cli/test_images.py::"
    "test_own_image_whose_description_excludes_the_type_is_a_warning": "other descriptions",
    "cli/test_launch.py::"
    "test_concurrent_launches_with_the_same_id_start_one_job": "tests/node/test_project_lock.py",
    "cli/test_launch.py::test_config_path_with_dots_or_links_works": "2 s",
    "cli/test_launch.py::"
    "test_failed_job_leaves_the_cluster_up": "test_first_failing_rank_is_named_and_sets_the_exit_code",
    "cli/test_launch.py::test_rank_and_local_rank_can_be_positional": "tests/unit/test_ranks.py has them",
    "cli/test_launch.py::test_shell_script_gets_the_variables_that_programs_read": "torch",
    "cli/test_launch.py::test_type_without_gpus_does_not_limit_ranks": "3 s; the refusal of ranks remains",
    "cli/test_log_selection.py::"
    "test_middle_of_a_long_log_is_dropped_and_reported": "tests/node/test_rank_logs.py",
    "cli/test_logs_and_jobs.py::test_logs_and_jobs_show_the_same_duration": "4 s, what is shown",
    "cli/test_logs_and_jobs.py::test_unknown_job_lists_the_newest_ones": "four jobs, a message",
    "cli/test_mfa.py::test_both_ways_out_of_credentials_that_end_early_work": "3 s; the refusal remains",
    "cli/test_mfa.py::test_damaged_cache_counts_as_empty": "tests/unit/test_state.py has damaged records",
    "cli/test_mfa.py::"
    "test_session_in_its_last_minutes_is_used_for_a_whole_command": "without a terminal remains",
    "cli/test_organization.py::"
    "test_capacity_is_decided_by_the_launch": "tests/cli/test_placing.py has missing capacity",
    "cli/test_organization.py::test_denied_region_where_this_computer_has_a_cluster_is_not_left_out": "2 s",
    "cli/test_organization.py::"
    "test_dry_run_is_one_call_whatever_the_number_of_nodes": "3 s; test_up.py counts all calls",
    "cli/test_organization.py::test_key_that_may_not_be_described_is_not_checked": "3 s; refused keys remain",
    "cli/test_organization.py::test_key_that_the_user_may_use_through_ec2": "a simulator of its own",
    "cli/test_organization.py::test_metadata_hop_limit": "tests/unit/test_golden_requests.py",
    "cli/test_organization.py::test_nodes_have_the_instance_profile": "tests/unit/test_golden_requests.py",
    "cli/test_organization.py::test_profile_that_may_be_passed_is_used": "tests/unit/test_golden_requests.py",
    "cli/test_organization.py::test_root_volumes_have_the_key": "tests/unit/test_golden_requests.py",
    "cli/test_organization.py::"
    "test_user_who_may_use_only_groups_of_clusters": "a simulator of its own; test_iam_policies.py",
    "cli/test_ownership.py::test_down_names_clusters_of_others": "4 s; the refusals remain",
    "cli/test_ownership.py::test_generated_session_name_is_not_part_of_the_owner": "2 s; the refusals remain",
    "cli/test_ownership.py::test_journal_avoids_the_identity_call": "2 s; it is about speed",
    "cli/test_placing.py::test_address_of_the_computer_is_looked_up_again_while_waiting": "waits",
    "cli/test_placing.py::test_computer_that_is_offline_goes_on_waiting": "waits; an outage of AWS remains",
    "cli/test_placing.py::"
    "test_each_zone_has_its_own_idempotency_token": "tests/unit/test_plan.py has the tokens",
    "cli/test_placing.py::"
    "test_expired_credentials_end_the_wait": "waits; test_rollback.py has expired credentials",
    "cli/test_placing.py::test_price_that_has_risen_while_waiting_ends_the_wait": "waits",
    "cli/test_placing.py::test_quota_of_one_region_leads_to_the_next": "test_next_region_is_tried",
    "cli/test_placing.py::"
    "test_region_that_the_account_has_not_enabled_is_left_out": "test_next_region_is_tried",
    "cli/test_placing.py::test_region_where_the_launch_is_denied_is_skipped": "test_next_region_is_tried",
    "cli/test_placing.py::test_region_without_the_type_is_skipped": "test_next_region_is_tried",
    "cli/test_placing.py::test_table_shows_what_was_tried": "what is shown",
    "cli/test_placing.py::"
    "test_zones_are_tried_in_the_given_order": "test_next_zone_is_tried_and_all_nodes_are_in_one",
    "cli/test_regions_searched.py::test_broken_variable_and_down": "a broken file remains",
    "cli/test_regions_searched.py::"
    "test_down_names_the_other_clusters_in_the_regions_that_are_recorded_here": "5 s, a message",
    "cli/test_regions_searched.py::test_explicit_region_without_the_cluster_names_the_right_one": "a message",
    "cli/test_regions_searched.py::test_unreadable_file_and_down": "a broken file remains",
    "cli/test_regions_searched.py::"
    "test_up_and_down_name_the_other_clusters_with_their_price": "5 s, a message",
    "cli/test_regions_searched.py::"
    "test_up_finds_the_cluster_that_it_has_created_in_another_region": "`down` finds it, too",
    "cli/test_regions_searched.py::"
    "test_up_of_a_cluster_beyond_the_limits_fails": "tests/unit/test_plan.py has the limits",
    "cli/test_reservations.py::test_clean_up_that_takes_too_long_leaves_nothing": "waits",
    "cli/test_reservations.py::"
    "test_earlier_deadline_of_the_user_is_kept": "tests/unit/test_plan.py has the deadlines",
    "cli/test_reservations.py::"
    "test_interrupted_wait_for_the_clean_up_leaves_nothing": "waits; tests/cli/test_placing.py",
    "cli/test_reservations.py::"
    "test_reservation_in_a_placement_group_uses_that_group": "3 s; test_golden_requests.py",
    "cli/test_reservations.py::test_up_after_down_waits_for_the_clean_up": "waits",
    "cli/test_run.py::"
    "test_closing_the_terminal_during_run_removes_the_cluster": "test_interrupts.py closes terminals",
    "cli/test_run.py::"
    "test_run_lists_remaining_resources_when_aws_refuses_calls": "tests/cli/test_down.py lists them",
    "cli/test_sim_verbs.py::test_interruption_time_of_a_spot_node_is_shown": "3 s, what is shown",
    "cli/test_sim_verbs.py::test_policy_that_allows_nothing_is_named_at_the_start": "a simulator of its own",
    "cli/test_sim_verbs.py::test_rank_is_unique_per_cluster": "9 nodes",
    "cli/test_sim_verbs.py::test_unknown_node_name_lists_the_candidates": "6 s, a message",
    "cli/test_ssh_routes.py::"
    "test_down_asks_every_node_through_the_jump_host": "6 s; test_proxy_command_is_remembered remains",
    "cli/test_sync_and_pull.py::"
    "test_first_launch_on_new_nodes_names_results_that_are_here": "three clusters, a message",
    "cli/test_sync_and_pull.py::"
    "test_results_go_back_to_their_places_and_no_sync_deletes_them": "9 s; pulled results remain",
    "cli/test_sync_and_pull.py::test_sync_starts_one_process_on_a_node": "3 s; it is about speed",
    "cli/test_terminal.py::"
    "test_ports_are_forwarded_by_options_before_or_after_the_node": "3 s; `ssh` remains",
    "cli/test_terminal.py::test_setup_lines_are_not_appended_to_the_spinner": "what is shown",
    "cli/test_terminal.py::test_tables_fit_the_terminal": "5 s, what is shown",
    "cli/test_timings_of_verbs.py::test_every_verb_shows_its_steps": "12 s; those of `launch` remain",
    "cli/test_timings_of_verbs.py::"
    "test_ranks_are_started_one_step_after_the_files_are_there": "it is about speed",
    "cli/test_up.py::test_max_cost_shortens_the_lifetime": "tests/unit/test_plan.py has the rule",
    "cli/test_what_is_sent.py::"
    "test_cluster_has_the_name_of_the_project_folder": "5 s; tests/cli/test_reference.py has the names",
    # Found by costs.py, each 3 to 25 s.
    "cli/test_logs_and_jobs.py::"
    "test_logs_can_be_limited_to_a_rank": "test_log_selection.py selects ranks and nodes",
    "cli/test_region.py::test_region_that_the_simulator_does_not_use_is_reported": "a message",
    "cli/test_regions_searched.py::"
    "test_broken_configuration_does_not_block_down": "test_down_does_not_guess_a_name remains",
    "cli/test_regions_searched.py::"
    "test_down_with_a_broken_configuration_does_not_choose_a_region": "test_down_refuses_to_choose remains",
    "cli/test_setup_commands.py::"
    "test_launch_is_refused_during_setup": "tests/node/test_project_lock.py has the lock",
    "cli/test_sim_verbs.py::"
    "test_rank_identifies_a_node_of_the_only_cluster_and_heal_lists_faults": "what is shown",
    "cli/test_sync_and_pull.py::"
    "test_folder_larger_than_the_memory_is_sent": "test_sync_node.py sends in frames",
    "cli/test_what_is_sent.py::test_bytes_that_are_not_utf_8_are_carried": "test_sync_node.py has such names",
    "lab/test_sim_addresses.py::test_public_addresses_are_unique_until_the_pool_is_empty": "256 nodes",
    "node/test_gang.py::"
    "test_launchers_that_wait_for_each_other_after_all_ranks_have_finished_are_ended": "test_gang_step.py",
    "node/test_gang_strangers.py::"
    "test_broken_node_does_not_keep_the_others_from_ending": "tests/unit/test_gang_step.py has each message",
    "node/test_gang_strangers.py::"
    "test_first_node_that_never_decides_is_left_out": "tests/unit/test_gang_step.py",
    "node/test_notices.py::test_maintenance_is_announced_days_before": "waits; other notices remain",
    "node/test_spread.py::"
    "test_strangers_do_not_keep_a_node_from_its_snapshot": "test_gang_strangers.py has strangers",
    "train/test_train_pipeline.py::test_sweep_times_every_mode_and_claims_no_speed_on_a_cpu": "a benchmark",
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
    # Single tests of the agent.
    "node/test_stall.py::"
    "test_retries_do_not_repeat_a_stall_that_is_to_be_killed": "5 s; a job that starts again remains",
    "node/test_stall.py::"
    "test_stall_that_is_left_alone_is_kept_on_all_nodes_until_a_rank_does_something": "5 s; others remain",
    "node/test_stall.py::"
    "test_stall_without_py_spy_is_declared_and_says_that_stacks_are_less_exact": "6 s, a message",
    "node/test_stall.py::test_time_until_the_launcher_starts_its_ranks_is_no_stall": "8 s, waits",
    "node/test_straggler_detection.py::"
    "test_ranks_that_report_steps_only_are_compared_by_the_interval": "3 s; times remain",
    "node/test_straggler_detection.py::test_restart_forgets_what_the_last_attempt_reported": "3 s",
    "node/test_straggler_detection.py::test_straggler_of_a_job_that_has_ended_is_kept_with_it": "3 s",
    "node/test_sync_node.py::"
    "test_folder_of_the_most_files": "8 s; tests/node/test_protocol.py has a project of the most files",
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
    "cli/test_region.py",
    "cli/test_regions_searched.py",
    "cli/test_reservations.py",
    "cli/test_run.py",
    "cli/test_scarcity.py",
    "cli/test_setup_commands.py",
    "cli/test_sim_verbs.py",
    "cli/test_tags.py",
    "cli/test_teardown.py",
    "cli/test_unwritable.py",
    "cli/test_up.py",
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
