"""`cloudddp export slurm`: the job as a script for another launcher."""

from __future__ import annotations

import click

from cloudddp.cli.commands.options import CLUSTER_SETTINGS, JOB_PARAMETERS
from cloudddp.cli.lazy_commands import LazyGroup
from cloudddp.cli.misplaced_options import JobVerb

_HERE = "cloudddp.cli.commands.export"
VERBS = {"slurm": (f"{_HERE}:slurm", "Write an sbatch script that runs SCRIPT with ARGS.")}

export = LazyGroup(
    "export",
    VERBS,
    help="""\
Write the same job as a script for another launcher.

Contacts no AWS service and needs no cluster.
""",
)


# [job] settings that also apply to Slurm, with help that does not mention EC2.
SETTINGS = (
    click.Option(
        ["--nproc-per-node"],
        metavar="K",
        help="Ranks per node: a number, or 'gpu': one per GPU.  [default: gpu]",
    ),
    click.Option(
        ["--save-minutes"],
        metavar="MIN",
        help="Minutes before the time limit at which ranks get SIGTERM, to save a snapshot and exit.  "
        "[default: 3]",
    ),
    click.Option(
        ["--rendezvous"],
        metavar="HOW",
        help="How ranks find each other: torchrun's c10d or static.  [default: c10d]",
    ),
)

slurm = JobVerb(
    "slurm",
    "cloudddp.cli.actions.export:slurm",
    params=[
        click.Option(["-m", "module"], is_flag=True, help="SCRIPT is a module, as in `python -m`."),
        next(one for one in CLUSTER_SETTINGS if one.key == "nodes"),
        *SETTINGS,
        click.Option(
            ["--gpus-per-node"],
            metavar="G",
            help="GPUs of each node: a number, or a type and a number such as a100:4; 0 for none.  "
            "[default: one per rank]",
        ),
        click.Option(
            ["--cpus-per-task"],
            type=click.IntRange(1, 4096),
            metavar="C",
            help="CPUs of each node, for all its ranks. Without it the job gets whole nodes (--exclusive).",
        ),
        click.Option(
            ["--mem"],
            metavar="AMOUNT",
            help="Memory of each node, such as 64G. Default with whole nodes: all of it.",
        ),
        click.Option(
            ["--time"],
            metavar="LIMIT",
            help="Time limit, such as 2-12:00:00. Default: that of the partition.",
        ),
        click.Option(["--partition"], metavar="NAME", help="Partition, or several with commas."),
        click.Option(["--account"], metavar="NAME", help="Account that the job is charged to."),
        click.Option(["--job-name"], metavar="NAME", help="Name of the job. Default: that of the script."),
        click.Option(
            ["--max-requeues"],
            type=click.IntRange(0, 1000),
            default=10,
            metavar="N",  # slurm.MAX_REQUEUES, not imported here
            help="How often the job is requeued at most, after a time limit or a lost node.  [default: 10]",
        ),
        click.Option(
            ["--setup", "setup"],
            multiple=True,
            metavar="COMMAND",
            help="Run this in the script's shell before the ranks start: 'module load cuda', '. "
            ".venv/bin/activate'.",
        ),
        click.Option(
            ["--sbatch", "extra"],
            multiple=True,
            metavar="OPTION",
            help="One more option of sbatch, such as --qos=high or --constraint=a100.",
        ),
        click.Option(
            ["-o", "--output"],
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Write the script to this file. Default: stdout.",
        ),
        click.Option(
            ["--env", "-e", "variables"],
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Set an environment variable in every rank; without VALUE to what it is where the job is "
            "submitted.",
        ),
        click.Option(
            ["--env-file", "env_files"],
            multiple=True,
            metavar="FILE",
            help="Set the variables of a file of NAME=VALUE lines (dotenv) in every rank. The script has "
            "their values.",
        ),
        *(one for one in JOB_PARAMETERS if isinstance(one, click.Argument)),
    ],
    help="""Write an sbatch script that runs SCRIPT with ARGS.

    The script starts torchrun on every node as `launch` does, with the settings of cloudddp.toml. It requeues
    the job, which then resumes from its snapshot, after a lost node, and when ranks exit with 143 before the
    time limit. Its exit code is that of the rank that failed first. docs/slurm.md describes it.

    \b
    Examples:
      cloudddp export slurm train.py --epochs 10 | sbatch
      cloudddp export slurm -n 4 --gpus-per-node 8 -o job.sh train.py
    """,
)
