"""`cloudddp` itself: its verbs, by name, each loaded when it is used. A test compares the short helps."""

from __future__ import annotations

import click

from cloudddp import __version__
from cloudddp.cli.lazy_commands import LazyGroup, Table, global_options

VERBS: dict[str, Table] = {
    "Start": {
        "init": ("nodes:init", "Write a short cloudddp.toml into FOLDER."),
        "doctor": ("clusters:doctor", "Check whether `up` would work, without creating anything."),
        "capacity": ("clusters:capacity", "Show where AWS has or sells capacity; buy nothing."),
        "up": ("clusters:up", "Create the cluster: nodes that are ready to train."),
        "launch": ("jobs:launch", "Sync the project and run SCRIPT with ARGS on every node."),
        "run": ("jobs:run", "Do a whole job: up, launch, pull and down in one command."),
    },
    "Look": {
        "ls": ("clusters:ls", "List cloudddp clusters, and remains, of any owner."),
        "status": ("clusters:status", "Show the cluster's nodes, deadline and cost so far."),
        "top": ("clusters:top", "Show GPUs, ranks, progress and cost as they are now, live."),
        "cost": ("clusters:cost", "Show what your clusters have cost, by month and project."),
        "jobs": ("jobs:jobs", "List the cluster's jobs, their state and training progress."),
        "logs": ("jobs:logs", "Show the logs of a job from the beginning."),
        "stacks": ("jobs:stacks", "Show where every rank of a job is, in a sentence and as stacks."),
        "preflight": ("nodes:preflight", "Check the nodes as a launch does, and measure their network."),
    },
    "Reach": {
        "ssh": ("nodes:ssh", "Log in to a node with OpenSSH."),
        "ssh-config": ("nodes:ssh_config", "Name the nodes for OpenSSH: editors, rsync, scp."),
        "forward": ("nodes:forward", "Forward ports of this computer to a node."),
        "tensorboard": ("nodes:tensorboard", "Run TensorBoard on the node of rank 0, and forward it."),
        "exec": ("nodes:exec_", "Run COMMAND on every node, in the project's folder."),
    },
    "Files": {
        "sync": ("nodes:sync", "Send the project's files to every node."),
        "pull": ("nodes:pull", "Copy results from the nodes to this computer."),
        "report": ("jobs:report", "Write one HTML page about a job: what ran, how it went, plots."),
    },
    "Continue": {
        "resume": ("jobs:resume", "Replace lost nodes and start a job again from its snapshot."),
        "watch": ("jobs:watch", "Follow a job, and resume it when a node is lost or reboots."),
        "extend": ("clusters:extend", "Move the deadline of the cluster, later or earlier."),
        "allow-me": ("clusters:allow_me", "Allow SSH from this computer's current address."),
    },
    "End": {
        "cancel": ("jobs:cancel", "Stop every rank of a job on every node."),
        "down": ("clusters:down", "Remove the cluster and verify that nothing is left."),
    },
    "Simulate and more": {
        "sim": ("simulator:sim", "Simulate EC2 on this computer, without an AWS account."),
        "export": ("export:export", "Write the same job as a script for another launcher."),
        "completion": ("nodes:completion", "Print the completion script for a shell."),
    },
}

HELP = """\
Run a training script on N GPU nodes of your own AWS account, and stop the bill when the job ends.

\b
  cloudddp init --example     create an example project
  cloudddp --sim up           try it on this computer, without AWS
  cloudddp up                 create nodes that are ready to train
  cloudddp launch train.py    start ranks on all nodes, follow their logs
  cloudddp down               remove everything; nothing is billed any more
"""

main = LazyGroup(
    "cloudddp",
    VERBS,
    help=HELP,
    params=list[click.Parameter](global_options(after_verb=False)),
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, "--version", prog_name="cloudddp")(main)
