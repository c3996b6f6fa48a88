"""Options that several verbs share, and their numbers."""

from __future__ import annotations

import math
from typing import Any

import click

from cloudddp.cli.lazy_commands import SettingOption


class Finite(click.FloatRange):
    """A number in a range. click's own range accepts nan, which passes every comparison."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON, with stable keys.")
YES = click.Option(
    ["-y", "--yes"],
    is_flag=True,
    envvar="CLOUDDDP_YES",
    help="Do not ask for confirmation. With --sim, nothing is asked.",
)
ANYONE = click.Option(["--anyone"], is_flag=True, help="Also act on a cluster that another user created.")
DRY_RUN = click.Option(
    ["--dry-run"],
    is_flag=True,
    help="Print every AWS call and every command on the nodes; call nothing. Needs no account.",
)

# The help texts and defaults are those of config/spec/, which `--help` does not import: a test compares them.
CLUSTER_SETTINGS = (
    SettingOption(
        "cluster", "nodes", "-n", "--nodes", metavar="N", standard="2",
        description="Number of nodes.",
    ),
    SettingOption(
        "cluster", "instance_type", "-t", "--instance-type", metavar="TYPE", standard="g5.xlarge",
        description="EC2 instance type of every node.",
    ),
    SettingOption(
        "cluster", "spot", "--spot", is_flag=True,
        description="Use spot instances (cheaper; AWS may interrupt them at any time).",
    ),
    SettingOption(
        "cluster", "reservation", "--reservation", metavar="ID",
        description="Id of an on-demand capacity reservation or a capacity block to launch into.",
    ),
    SettingOption(
        "cluster", "placement_group", "--no-placement-group", is_flag=True, flag_value="false",
        description="Place two nodes or more close together, in a placement group of strategy cluster.",
    ),
    SettingOption(
        "cluster", "efa", "--no-efa", is_flag=True, flag_value="false",
        description="Use EFA between two nodes or more, on all network cards, if the instance type has it.",
    ),
    SettingOption(
        "cluster", "require_efa", "--require-efa", is_flag=True,
        description="Fail if EFA is missing: on the instance type, on a node, or when a rank starts NCCL.",
    ),
    SettingOption(
        "cluster", "max_hours", "--max-hours", metavar="HOURS", standard="8",
        description="Nodes terminate after this many hours. This cannot be switched off.",
    ),
    SettingOption(
        "cluster", "idle_minutes", "--idle-minutes", metavar="MIN", standard="0",
        description="A node that had no job and no SSH connection for so many minutes terminates by itself; 0 switches this off.",
    ),
    SettingOption(
        "cluster", "max_cost", "--max-cost", metavar="USD",
        description="Maximum cost of the cluster in USD, enforced as an earlier deadline.",
    ),
    SettingOption(
        "cluster", "price", "--price", metavar="USD",
        description="USD per node and hour, for an instance type whose price cloudddp does not know.",
    ),
    SettingOption(
        "cluster", "allow_cpu", "--allow-cpu", is_flag=True,
        description="Accept nodes without a GPU, or with defective ones.",
    ),
    SettingOption(
        "cluster", "regions", "--regions", metavar="REGION,...",
        description="Regions in which `up` looks for capacity, in this order. Other commands use the one where the cluster is.",
    ),
    SettingOption(
        "cluster", "zones", "--zones", metavar="ZONE,...",
        description="Availability zones in which `up` looks for capacity, in this order. All nodes are in one zone. "
        "Default: every zone that offers the type and has a subnet with enough free addresses.",
    ),
    SettingOption(
        "cluster", "wait_capacity", "--wait-capacity", metavar="TIME", standard="0",
        description="How long `up` keeps trying if no zone has capacity, such as 30m or 2h. 0 does not wait. Nothing runs between two "
        "attempts; a launch that AWS accepts and then ends is billed, and counts against max_cost.",
    ),
    SettingOption(
        "cluster", "vpc", "--vpc", metavar="VPC",
        description="VPC: an id, or tag:KEY=VALUE. Default: that of the subnets, or the default VPC.",
    ),
    SettingOption(
        "cluster", "subnets", "--subnets", metavar="SUBNET,...",
        description="Subnets of one VPC, by id or tag:KEY=VALUE, in the order in which `up` looks for capacity. "
        "Default: those of the VPC.",
    ),
    SettingOption(
        "cluster", "image", "--image", metavar="IMAGE",
        description="AMI id, or an SSM parameter that holds one; {arch} becomes x86_64 or arm64.",
    ),
    SettingOption(
        "cluster", "disk_gb", "--disk-gb", metavar="GIB", standard="150",
        description="Size of the root volume in GiB (gp3, encrypted).",
    ),
    SettingOption(
        "cluster", "kms_key", "--kms-key", metavar="KEY",
        description="KMS key of the root volume: an id, alias/NAME or an ARN. Default: the account's key for EBS.",
    ),
    SettingOption(
        "cluster", "instance_profile", "--instance-profile", metavar="PROFILE",
        description="Instance profile of the nodes, by name or ARN: jobs get the permissions of its role. Default: none.",
    ),
    SettingOption(
        "cluster", "tags", "--tag", metavar="K=V", multiple=True,
        description="More tags for everything that `up` creates, as an organization may require. Tags are not secret.",
    ),
    SettingOption(
        "cluster", "connect", "--connect", metavar="HOW",
        description="How SSH reaches the nodes: by public address, by private address (VPN), or by proxy_jump.",
    ),
    SettingOption(
        "cluster", "proxy_jump", "--proxy-jump", metavar="HOST",
        description="Jump host for SSH to private nodes, as for `ssh -J`; its host key must be in your known_hosts.",
    ),
    SettingOption(
        "cluster", "proxy_command", "--proxy-command", metavar="COMMAND",
        description="Command that connects to a node's SSH server, as ssh's ProxyCommand: %h is the instance id, %a the address.",
    ),
    SettingOption(
        "cluster", "ssh_from", "--ssh-from", metavar="CIDR",
        description="CIDR blocks that may connect with SSH. Default: this computer's address only.",
    ),
)  # fmt: skip

NODES_MIN = SettingOption(
    "job", "nodes_min", "--nodes-min", metavar="M",
    description="If a lost node cannot be replaced, resume the job with the nodes that are left if they are at least this many. "
    "Default: all.",
)  # fmt: skip
VARIABLES = (
    click.Option(
        ["--env", "-e", "variables"], multiple=True, metavar="NAME[=VALUE]",
        help="Set an environment variable in every rank; without VALUE to what it is here.",
    ),
    click.Option(
        ["--env-file", "env_files"], multiple=True, metavar="FILE",
        help="Set the variables of a file of NAME=VALUE lines (dotenv) in every rank.",
    ),
)  # fmt: skip
RESUME_SETTINGS = (NODES_MIN, next(one for one in CLUSTER_SETTINGS if one.key == "wait_capacity"))

JOB_PARAMETERS = (
    click.Option(["-m", "module"], is_flag=True, help="SCRIPT is a module, as in `python -m`."),
    SettingOption(
        "job", "nproc_per_node", "--nproc-per-node", metavar="K", standard="gpu",
        description="Ranks per node: a number, a list with one number per node, or 'gpu': one per GPU (1 without GPUs).",
    ),
    SettingOption(
        "job", "rendezvous", "--rendezvous", metavar="HOW", standard="c10d",
        description="How ranks find each other: torchrun's c10d or static, or direct (no torchrun; RANK etc. are set).",
    ),
    SettingOption(
        "job", "retries", "--retries", metavar="N", standard="0",
        description="How often within an hour a job that has failed is started again, on all nodes. Errors of the script "
        "itself are not repeated.",
    ),
    NODES_MIN,
    SettingOption(
        "job", "stall_minutes", "--stall-minutes", metavar="MIN", standard="10",
        description="Minutes without output, training status, CPU or GPU activity of any rank after which a job has stalled. 0 "
        "watches nothing.",
    ),
    SettingOption(
        "job", "on_stall", "--on-stall", metavar="HOW", standard="kill",
        description="What happens to a stalled job, after its stacks were read: kill it, restart it (counts as one of "
        "`retries`), leave it, or kill it and shut the nodes down after `launch --keep` (30 minutes), which ends the cluster.",
    ),
    SettingOption(
        "job", "save_minutes", "--save-minutes", metavar="MIN", standard="3",
        description="Minutes before the cluster's deadline, and before a scheduled maintenance of a node, at which ranks get "
        "SIGTERM, to save a snapshot and exit.",
    ),
    SettingOption(
        "job", "results_s3", "--results-s3", metavar="URL",
        description="Where the nodes copy outputs and logs when a job has ended, with the role of cluster.instance_profile: an S3 bucket "
        "and a prefix. `pull` reads them there once the cluster has gone. Default: nowhere.",
    ),
    SettingOption(
        "job", "preflight", "--no-preflight", is_flag=True, flag_value="false",
        description="Check, before ranks start, that all nodes have the same GPUs, driver, Python, torch, CUDA and NCCL, space "
        "on their disks and clocks within 2 s.",
    ),
    *VARIABLES,
    click.Argument(["script"]),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
)  # fmt: skip
