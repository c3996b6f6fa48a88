"""The verbs on files and nodes: init, sync, pull, exec, ssh and what goes over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cloudddp.cli.commands.options import ANYONE, JOB, JSON, flag, yes
from cloudddp.cli.lazy_commands import Option, Verb, completes

_FOLDER = click.Path(file_okay=False, path_type=Path)


def _node(text: str, **more: Any) -> click.Option:
    complete = completes("nodes")
    return Option("--node", "K", text, int, shell_complete=complete, **more)


init = Verb(
    "init:init",
    params=[
        click.Argument(["folder"], required=False, type=_FOLDER),
        Option(
            "--example",
            "[classic|exact|trainer]",
            "Copy an example project, too: a script as in PyTorch's tutorials (classic, the default), "
            "one that gives the same result on any number of ranks (exact), or the reference trainer.",
            is_flag=False,
            flag_value="classic",
        ),
    ],
    help="""Write a short cloudddp.toml into FOLDER.

    Without FOLDER, into the current one. Looks at the project first: which script trains, which file lists
    its packages, which data it reads. On a terminal it asks how many nodes, of which type, and what they may
    cost.

    \b
    Examples:
      cloudddp init
      cloudddp init --example my-project
      cloudddp init --example trainer my-project
    """,
)

sync = Verb(
    "sync:sync",
    params=[
        ANYONE,
        yes("Do not ask for confirmation."),
        flag("--results put_back", "Also put pulled results back: those of JOB, or the newest."),
        JOB,
    ],
    help="""Send the project's files to every node.

    `launch` does this first. Nodes that have the files of another project get those of this one only after a
    confirmation.

    With --results, files in results/JOB go back to their places in the project, for a script that continues
    from its checkpoints, and those of the jobs that JOB continued, where JOB has no newer version; those in
    results/JOB/nodeN to that node only. Files of the project itself stay as they are.

    \b
    Example:
      cloudddp sync --results
    """,
)

preflight = Verb(
    "preflight:preflight",
    params=[
        ANYONE,
        flag(
            "--bandwidth",
            "Also measure all-reduce between each pair of nodes, then between all: with NCCL on GPUs, "
            "with gloo elsewhere.",
        ),
        JSON,
    ],
    help="""Check the nodes as a launch does, and measure their network.

    Without a job: every node connects to every other one; GPUs, driver, Python, torch, CUDA and NCCL have to
    be the same on all, clocks alike, disks not full. It runs on the hosts, also with [job] container, and
    mounts no [[shared]] folder. It is refused while a job runs, and leaves nothing on the nodes. Exits with 1
    if a check fails, or a node is slow.

    \b
    Examples:
      cloudddp preflight
      cloudddp preflight --bandwidth --json | jq .slow_nodes
    """,
)

pull = Verb(
    "pull:pull",
    params=[
        ANYONE,
        click.Argument(["paths"], nargs=-1),
        Option(
            "--job job_id",
            "JOB",
            "Job whose results to pull (default: the newest).",
            shell_complete=completes("jobs"),
        ),
        _node("Pull from this node (default: the node that ran rank 0)."),
        flag("--all-nodes", "Pull from every node: those without rank 0 into nodeN."),
        Option("--to", None, "Destination folder (default: results/JOB).", _FOLDER),
    ],
    help="""Copy results from the nodes to this computer.

    PATHS are files or folders of the project on the nodes (default: job.outputs, or every file that jobs
    wrote in the project, up to job.pull_mb of those not pulled yet); they are no patterns. The id of a job is
    taken as --job. Files of a node without rank 0 go to results/JOB/nodeN. Files that already exist here are
    not sent again, and a transfer that broke continues. Exits with 1 if a result was left out.

    \b
    Examples:
      cloudddp pull --all-nodes
      cloudddp pull checkpoints/last.pt --to .
    """,
)

exec_ = Verb(
    "exec:exec_",
    passes_arguments=True,
    params=[
        ANYONE,
        _node("Run it on this node only; may be repeated.", multiple=True),
        click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED),
    ],
    help="""Run COMMAND on every node, in the project's folder. Redirect the output of what it leaves in the
    background.

    A single word is a shell command line; several words are a program and its arguments. Lines are shown as
    they arrive, those of several nodes with the node. Standard input goes to every node, unless it is a
    terminal. Ctrl-C ends the command on all nodes. Exits with the highest exit code of all nodes, which are
    listed if one is not 0.

    \b
    Examples:
      cloudddp exec -- nvidia-smi -L
      cloudddp exec --node 1 'df -h / | tail -1'
      cloudddp exec -- tar -xz < data.tar.gz
    """,
)


class _Ssh(Verb):
    """The verb whose words belong to OpenSSH from the first one on that is no option of cloudddp: click would
    read an option inside `-L6006:localhost:6006`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self.own_words(ctx, args)
        return super().parse_args(ctx, [*args[:at], "--", *args[at:]])


ssh = _Ssh(
    "nodes:ssh",
    passes_arguments=True,
    params=[
        ANYONE,
        click.Argument(
            ["words"],
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[NODE] [COMMAND]...",
            shell_complete=completes("nodes"),
        ),
    ],
    help="""Log in to a node with OpenSSH.

    NODE is 0 by default; options of `ssh` may be before and after it. The host key is checked as strictly as
    by cloudddp itself. Your own ssh configuration is not read; your SSH agent and ports are not forwarded to
    the node, but those that you name.

    \b
    Examples:
      cloudddp ssh 1 nvidia-smi
      cloudddp ssh -L 6006:localhost:6006 0
    """,
)

ssh_config = Verb(
    "nodes:ssh_config",
    only_own_options=True,
    params=[],
    help="""Name the nodes for OpenSSH: editors, rsync, scp.

    Prints the line for the top of ~/.ssh/config with which OpenSSH reaches the nodes of each cluster NAME as
    NAME-0, NAME-1 and so on: with its key, its route, and host keys that are checked as strictly as by
    cloudddp. It is needed once: `up` adds the nodes of later clusters, and `down` removes them.

    \b
    Examples:
      cloudddp ssh-config
      rsync -a training-0:project/runs/ runs/     # of a cluster named training
    """,
)

forward = Verb(
    "forward:forward",
    params=[
        ANYONE,
        _node("To this node (default: 0).", default=0),
        click.Argument(["ports"], nargs=-1, required=True, metavar="LOCAL[:REMOTE]..."),
    ],
    help="""Forward ports of this computer to a node.

    Until Ctrl-C. Only programs of this computer can connect to LOCAL. A program on the node listens on
    REMOTE (default: the same number), on localhost.

    \b
    Examples:
      cloudddp forward 8888
      cloudddp forward 8080:80 6006 --node 1
    """,
)

tensorboard = Verb(
    "forward:tensorboard",
    params=[ANYONE, flag("--open browse", "Open it in the browser."), JOB],
    help="""Run TensorBoard on the node of rank 0, and forward it.

    That of JOB, or of the newest job. Until Ctrl-C, or until the connection breaks. It shows the event files
    below [job] outputs, or in the project. Where the job's Python has no TensorBoard, pip installs it into a
    folder of its own.

    \b
    Examples:
      cloudddp tensorboard --open
      cloudddp tensorboard 20261127-1015
    """,
)

completion = Verb(
    "completion:completion",
    only_own_options=True,
    params=[click.Argument(["shell"], required=False, metavar="[bash|zsh|fish]")],
    help="""Print the completion script for a shell.

    It completes verbs and options, and the names of clusters, jobs and nodes that this computer knows.
    Without an argument, the shell is that of SHELL.

    \b
    Examples:
      echo 'eval "$(cloudddp completion bash)"' >> ~/.bashrc
      echo 'eval "$(cloudddp completion zsh)"' >> ~/.zshrc
      cloudddp completion fish > ~/.config/fish/completions/cloudddp.fish
    """,
)
