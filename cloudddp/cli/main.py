"""`cloudddp` itself: its verbs, by name. Each is loaded when it is used; a test compares the short helps with
theirs."""

from __future__ import annotations

import click

from cloudddp import __version__
from cloudddp.cli.lazy_commands import LazyGroup, global_options

_CLUSTERS, _JOBS = "cloudddp.cli.commands.clusters", "cloudddp.cli.commands.jobs"
_NODES, _SIMULATOR = "cloudddp.cli.commands.nodes", "cloudddp.cli.commands.simulator"
_EXPORT = "cloudddp.cli.commands.export"

VERBS = {
    "allow-me": (f"{_CLUSTERS}:allow_me", "Allow SSH from this computer's current address."),
    "cancel": (f"{_JOBS}:cancel", "Stop every rank of a job on every node."),
    "capacity": (f"{_CLUSTERS}:capacity", "Show where AWS has or sells capacity; buy nothing."),
    "completion": (f"{_NODES}:completion", "Print the completion script for a shell."),
    "cost": (f"{_CLUSTERS}:cost", "Show what your clusters have cost, by month and project."),
    "doctor": (f"{_CLUSTERS}:doctor", "Check whether `up` would work, without creating anything."),
    "down": (f"{_CLUSTERS}:down", "Remove the cluster and verify that nothing is left."),
    "exec": (f"{_NODES}:exec_", "Run COMMAND on every node, in the project's folder."),
    "export": (f"{_EXPORT}:export", "Write the same job as a script for another launcher."),
    "forward": (f"{_NODES}:forward", "Forward ports of this computer to a node."),
    "extend": (f"{_CLUSTERS}:extend", "Move the deadline of the cluster, later or earlier."),
    "init": (f"{_NODES}:init", "Write a short cloudddp.toml into FOLDER."),
    "jobs": (f"{_JOBS}:jobs", "List the cluster's jobs, their state and training progress."),
    "launch": (f"{_JOBS}:launch", "Sync the project and run SCRIPT with ARGS on every node."),
    "logs": (f"{_JOBS}:logs", "Show the logs of a job from the beginning."),
    "ls": (
        f"{_CLUSTERS}:ls",
        "List cloudddp clusters, and remains, of any owner.",
    ),
    "preflight": (f"{_NODES}:preflight", "Check the nodes as a launch does, and measure their network."),
    "pull": (f"{_NODES}:pull", "Copy results from the nodes to this computer."),
    "report": (f"{_JOBS}:report", "Write one HTML page about a job: what ran, how it went, plots."),
    "resume": (f"{_JOBS}:resume", "Replace lost nodes and start a job again from its snapshot."),
    "run": (f"{_JOBS}:run", "Do a whole job: up, launch, pull and down in one command."),
    "sim": (f"{_SIMULATOR}:sim", "Simulate EC2 on this computer, without an AWS account."),
    "ssh": (f"{_NODES}:ssh", "Log in to a node with OpenSSH."),
    "ssh-config": (f"{_NODES}:ssh_config", "Name the nodes for OpenSSH: editors, rsync, scp."),
    "stacks": (f"{_JOBS}:stacks", "Show where every rank of a job is, in a sentence and as stacks."),
    "status": (f"{_CLUSTERS}:status", "Show the cluster's nodes, deadline and cost so far."),
    "sync": (f"{_NODES}:sync", "Send the project's files to every node."),
    "top": (f"{_CLUSTERS}:top", "Show GPUs, ranks, progress and cost as they are now, live."),
    "tensorboard": (f"{_NODES}:tensorboard", "Run TensorBoard on the node of rank 0, and forward it."),
    "up": (f"{_CLUSTERS}:up", "Create the cluster: nodes that are ready to train."),
    "watch": (f"{_JOBS}:watch", "Follow a job, and resume it when a node is lost or reboots."),
}

HEADINGS = {
    "Start": "init doctor capacity up launch run".split(),
    "Look": "ls status top cost jobs logs stacks preflight".split(),
    "Reach": "ssh ssh-config forward tensorboard exec".split(),
    "Files": "sync pull report".split(),
    "Continue": "resume watch extend allow-me".split(),
    "End": "cancel down".split(),
    "Simulate and more": "sim export completion".split(),
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
    HEADINGS,
    help=HELP,
    params=list[click.Parameter](global_options(after_verb=False)),
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, "--version", prog_name="cloudddp")(main)
