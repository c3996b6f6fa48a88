"""Options that several verbs share, and their numbers."""

from __future__ import annotations

import math
from typing import Any

import click

from cloudddp.cli.lazy_commands import Option, SettingOption, completes, global_option


def flag(names: str, text: str) -> Option:
    return Option(names, None, text, is_flag=True)


class Finite(click.FloatRange):
    """A number in a range. click's own range accepts nan, which passes every comparison."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


def yes(text: str) -> click.Option:
    return global_option("-y --yes", text, envvar="CLOUDDDP_YES")


YES = yes("Do not ask for confirmation. With --sim, nothing is asked.")
JOB = click.Argument(["job_id"], metavar="[JOB]", required=False, shell_complete=completes("jobs"))
JSON = flag("--json as_json", "Print JSON, with stable keys.")
ANYONE = global_option("--anyone", "Also act on a cluster that another user created.")
DRY_RUN = flag(
    "--dry-run", "Print every AWS call and every command on the nodes; call nothing. Needs no account."
)

# `standard` is the default in config/spec.py, which `--help` does not import: a test compares them.
CLUSTER_SETTINGS = (
    SettingOption("cluster", "nodes", "-n", "--nodes", metavar="N", standard="2"),
    SettingOption("cluster", "instance_type", "-t", "--instance-type", metavar="TYPE", standard="g5.xlarge"),
    SettingOption(
        "cluster",
        "instance_type",
        "--gpu",
        metavar="GPU[:N]",
        rare=True,
        description="GPU in place of an instance type, and how many on each node: the cheapest type first.",
    ),
    SettingOption("cluster", "spot", "--spot", is_flag=True),
    SettingOption(
        "cluster", "spot", "--prefer-spot", "--spot=prefer", is_flag=True, flag_value="prefer", hidden=True
    ),
    SettingOption("cluster", "reservation", "--reservation", metavar="ID", rare=True),
    SettingOption(
        "cluster", "placement_group", "--no-placement-group", is_flag=True, flag_value="false", rare=True
    ),
    SettingOption("cluster", "efa", "--no-efa", is_flag=True, flag_value="false", rare=True),
    SettingOption("cluster", "require_efa", "--require-efa", is_flag=True, rare=True),
    SettingOption("cluster", "max_hours", "--max-hours", metavar="HOURS", standard="8"),
    SettingOption("cluster", "idle_minutes", "--idle-minutes", metavar="MIN", standard="60", rare=True),
    SettingOption("cluster", "max_cost", "--max-cost", metavar="USD"),
    SettingOption("cluster", "price", "--price", metavar="USD", rare=True),
    SettingOption("cluster", "allow_cpu", "--allow-cpu", is_flag=True, rare=True),
    SettingOption("cluster", "regions", "--regions", metavar="REGION,...", rare=True),
    SettingOption("cluster", "zones", "--zones", metavar="ZONE,...", rare=True),
    SettingOption("cluster", "wait_capacity", "--wait-capacity", metavar="TIME", standard="0", rare=True),
    SettingOption("cluster", "vpc", "--vpc", metavar="VPC", rare=True),
    SettingOption("cluster", "subnets", "--subnets", metavar="SUBNET,...", rare=True),
    SettingOption("cluster", "image", "--image", metavar="IMAGE", rare=True),
    SettingOption("cluster", "disk_gb", "--disk-gb", metavar="GIB", standard="150", rare=True),
    SettingOption("cluster", "kms_key", "--kms-key", metavar="KEY", rare=True),
    SettingOption("cluster", "instance_profile", "--instance-profile", metavar="PROFILE", rare=True),
    SettingOption("cluster", "tags", "--tag", metavar="K=V", multiple=True, rare=True),
    SettingOption("cluster", "connect", "--connect", metavar="HOW", rare=True),
    SettingOption("cluster", "proxy_jump", "--proxy-jump", metavar="HOST", rare=True),
    SettingOption("cluster", "proxy_command", "--proxy-command", metavar="COMMAND", rare=True),
    SettingOption("cluster", "ssh_from", "--ssh-from", metavar="CIDR", rare=True),
)

NODES_MIN = SettingOption("job", "nodes_min", "--nodes-min", metavar="M", rare=True)


def variables(where: str, more: str = "") -> list[click.Option]:
    """Return the options for variables of ranks. `where` one without a value is; `more` about files."""
    text = f"Set an environment variable in every rank; without VALUE to what it is {where}."
    files = f"Set the variables of a file of NAME=VALUE lines (dotenv) in every rank.{more}"
    complete = completes("files")
    return [
        global_option("--env -e variables", text, "NAME[=VALUE]", multiple=True),
        global_option("--env-file env_files", files, "FILE", multiple=True, shell_complete=complete),
    ]


VARIABLES = variables("here")
RESUME_SETTINGS = (NODES_MIN, next(one for one in CLUSTER_SETTINGS if one.key == "wait_capacity"))

JOB_PARAMETERS = (
    flag("-m module", "SCRIPT is a module, as in `python -m`."),
    SettingOption("job", "nproc_per_node", "--nproc-per-node", metavar="K", standard="gpu"),
    SettingOption("job", "rendezvous", "--rendezvous", metavar="HOW", standard="c10d", rare=True),
    SettingOption("job", "container", "--container", metavar="IMAGE", rare=True),
    SettingOption("job", "retries", "--retries", metavar="N", standard="0"),
    NODES_MIN,
    SettingOption("job", "stall_minutes", "--stall-minutes", metavar="MIN", standard="10", rare=True),
    SettingOption("job", "on_stall", "--on-stall", metavar="HOW", standard="kill", rare=True),
    SettingOption("job", "save_minutes", "--save-minutes", metavar="MIN", standard="3", rare=True),
    SettingOption("job", "results_s3", "--results-s3", metavar="URL"),
    SettingOption("job", "preflight", "--no-preflight", is_flag=True, flag_value="false", rare=True),
    *VARIABLES,
    click.Argument(["script"], shell_complete=completes("files")),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, shell_complete=completes("files")),
)
