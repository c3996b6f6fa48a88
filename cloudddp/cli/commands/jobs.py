"""The verbs on jobs: launch, run, logs, jobs, cancel, report."""

from __future__ import annotations

import re

import click

from cloudddp.cli.commands.options import (
    ANYONE,
    CLUSTER_SETTINGS,
    DRY_RUN,
    JOB,
    JOB_PARAMETERS,
    JSON,
    RESUME_SETTINGS,
    VARIABLES,
    YES,
    Finite,
    flag,
)
from cloudddp.cli.lazy_commands import Option, Verb, completes
from cloudddp.cli.misplaced_options import JobVerb

launch = JobVerb(
    "launch:launch",
    params=[
        flag("-d --detach", "Start the job and return; `cloudddp logs -f` follows it."),
        flag(
            "--down",
            "With -d: the nodes terminate by themselves after the job, however it ends, also if it is "
            "not started.",
        ),
        Option(
            "--keep",
            "MIN",
            "With --down or on_stall = down: minutes for a `cloudddp pull` until the nodes terminate.  "
            "[default: 30]",
            Finite(0, 10_000),
        ),
        ANYONE,
        DRY_RUN,
        *JOB_PARAMETERS,
    ],
    help="""Sync the project and run SCRIPT with ARGS on every node.

    Follows the logs of all ranks. The exit code is the job's: that of the rank that failed first.

    \b
    Examples:
      cloudddp launch train.py --epochs 10
      cloudddp launch --nproc-per-node 4 -m train.main --epochs 10
      cloudddp launch -d --down --keep 60 train.py
    """,
)

_JOB_ID = re.compile(r"\d{8}-\d{6}-\w{4}")


class _Run(JobVerb):
    """The id of a job may follow `--results`; any other word there is the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self.own_words(ctx, args)
        job_id = "".join(args[at : at + 1])
        is_given = args[at - 1 : at] == ["--results"] and _JOB_ID.fullmatch(job_id)
        rest = super().parse_args(ctx, [*args[:at], *args[at + 1 :]] if is_given else args)
        ctx.params["job_id"] = job_id if is_given else None
        return rest


run = _Run(
    "run:run",
    params=[
        *CLUSTER_SETTINGS,
        YES,
        flag(
            "-d --detach",
            "Start the job and return. The nodes end by themselves after it: once its results are in "
            "job.results_s3, or after --keep minutes.",
        ),
        flag("--discard", "Terminate the nodes even if they hold files that were not pulled."),
        Option(
            "--keep keep_files",
            "MIN",
            "Minutes for which nodes stay that hold files that were not pulled. [default: 60]",
            Finite(1, 10_000),
            default=60.0,
        ),
        flag("--results put_back", "Put results back: `sync --results [JOB]`."),
        Option(
            "--keep-on-failure keep",
            "MIN",
            "After a job that has failed: minutes without a use until its nodes end.",
            Finite(1, 10_000),
            rare=True,
        ),
        *JOB_PARAMETERS,
    ],
    help="""Do a whole job: up, launch, pull and down in one command.

    The files that the job wrote in the project are pulled to results/JOB (job.outputs selects some). The
    cluster is removed whatever happens, unless not all of them could be pulled: then the nodes stay for
    --keep minutes, and the exit code is 3.

    \b
    Examples:
      cloudddp run -n 2 -t g5.12xlarge --max-cost 20 train.py --epochs 10
      cloudddp run -d --max-cost 20 --results-s3 s3://my-bucket/runs train.py
    """,
)

logs = Verb(
    "logs:logs",
    params=[
        ANYONE,
        JOB,
        flag("-f --follow", "Follow until the job ends, and exit with the job's exit code."),
        Option("--rank only", "R,...", "Show only these ranks, such as 3,8-15.", multiple=True),
        Option(
            "--node nodes",
            "N,...",
            "Show only the ranks of these nodes.",
            multiple=True,
            shell_complete=completes("nodes"),
        ),
        Option("--since", "TIME", "Show what was written in the last 90s, 5m, 2h or 1d."),
        Option("--tail", "N", "Show the last N lines of each rank (with --grep: that match)."),
        Option("--grep", "RE", "Show only lines in which this regular expression is found."),
        flag("--json as_json", "Print a JSON object per line: node, rank, line."),
        flag("--raw", "Print terminal escapes as they are. They can change the terminal."),
    ],
    help="""Show the logs of a job from the beginning.

    Without JOB, those of the job that is running, or else of the newest one. Lines of more than 64 KiB are
    cut, and so is the middle of a log that was longer than job.log_mb.

    \b
    Examples:
      cloudddp logs --rank 0 --tail 20
      cloudddp logs -f --since 5m --grep 'loss|error'
    """,
)

jobs = Verb(
    "jobs:jobs",
    params=[ANYONE, JSON],
    help="""List the cluster's jobs, their state and training progress.

    The newest job comes last.

    \b
    Example:
      cloudddp jobs --json | jq -r '.[-1].state'
    """,
)

cancel = Verb(
    "jobs:cancel",
    params=[ANYONE, JOB],
    help="""Stop every rank of a job on every node.

    Without JOB, those of the job that is running, or else of the newest one. The cluster stays up.

    \b
    Example:
      cloudddp cancel && cloudddp pull
    """,
)

stacks = Verb(
    "stacks:stacks",
    params=[ANYONE, JOB, JSON],
    help="""Show where every rank of a job is, in a sentence and as stacks.

    Without JOB, those of the job that is running. The ranks stop for a moment while py-spy reads them, and go
    on. Where NCCL's RAS answers (NCCL 2.24 or newer), and where ranks have left dumps of PyTorch's flight
    recorder, a sentence each says which ranks are missing in a collective; for the dumps also after the end
    of the job.

    \b
    Example:
      cloudddp stacks | head -3
    """,
)


report = Verb(
    "report:report",
    params=[JOB],
    help="""Write one HTML page about a job: what ran, how it went, plots.

    Without JOB, about the newest one whose results were pulled; a prefix of the id is enough. It is written
    from what is on this computer, so also when the nodes are gone; `pull` and `run` write it, too. The page
    loads nothing from anywhere. Values of variables are replaced in it (of 6 characters and more).

    \b
    Example:
      cloudddp report 20261127
    """,
)


class _Resume(Verb):
    """What follows `--` is for the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        ctx.params["more"] = tuple(args[end + 1 :])
        return rest


resume = _Resume(
    "resume:resume",
    params=[
        JOB,
        flag("-d --detach", "Start the job and return."),
        YES,
        Option(
            "--replace replaced",
            "NODE",
            "Also replace this node, which EC2 says runs: it is terminated first.",
            int,
            multiple=True,
            shell_complete=completes("nodes"),
        ),
        *RESUME_SETTINGS,
        *VARIABLES,
    ],
    help="""Replace lost nodes and start a job again from its snapshot.

    Nodes that have terminated are replaced by the same type in the same zone, with the same deadline. Then
    the script is started again with the arguments and settings of JOB, or of the newest job, as a new job:
    where it continues is up to the script. Arguments after `--` are appended to those of the script. The job
    has to have been launched from this computer.

    \b
    Examples:
      cloudddp resume
      cloudddp resume --replace 3 --wait-capacity 2h
      cloudddp resume -- --resume checkpoints/last.pt
    """,
)

watch = Verb(
    "resume:watch",
    params=[
        JOB,
        Option(
            "--times",
            "N",
            "How often the job is resumed at most. [default: 10]",
            click.IntRange(1, 1000),
            default=10,
        ),
        *RESUME_SETTINGS,
        *VARIABLES,
    ],
    help="""Follow a job, and resume it when a node is lost or reboots.

    Leave it running in tmux, or start it from cron: of several on this computer, one resumes the job. Ctrl-C
    ends it and not the job. The exit code is the job's.

    \b
    Example:
      cloudddp watch --wait-capacity 2h
    """,
)
