"""`cloudddp export slurm`: the job as a script for another launcher."""

from __future__ import annotations

import click

from cloudddp.cli.commands.options import CLUSTER_SETTINGS, JOB_PARAMETERS, flag, variables
from cloudddp.cli.lazy_commands import LazyGroup, Option, SettingOption, listed
from cloudddp.cli.misplaced_options import JobVerb

_SAVE = "Minutes before the time limit at which ranks get SIGTERM, to save a snapshot and exit."
# Settings that also apply to Slurm, with help that does not mention EC2.
SETTINGS = [
    SettingOption("job", key, f"--{key.replace('_', '-')}", metavar=value, standard=default, description=text)
    for key, value, default, text in (
        ("nproc_per_node", "K", "gpu", "Ranks per node: a number, or 'gpu': one per GPU."),
        ("save_minutes", "MIN", "3", _SAVE),
        ("rendezvous", "HOW", "c10d", "How ranks find each other: torchrun's c10d or static."),
    )
]

slurm = JobVerb(
    "export:slurm",
    params=[
        flag("-m module", "SCRIPT is a module, as in `python -m`."),
        next(one for one in CLUSTER_SETTINGS if one.key == "nodes"),
        *SETTINGS,
        Option(
            "--gpus-per-node",
            "G",
            "GPUs of each node: a number, or a type and a number such as a100:4; 0 for none.  "
            "[default: one per rank]",
        ),
        Option(
            "--cpus-per-task",
            "C",
            "CPUs of each node, for all its ranks. Without it the job gets whole nodes (--exclusive).",
            click.IntRange(1, 4096),
        ),
        Option("--mem", "AMOUNT", "Memory of each node, such as 64G. Default with whole nodes: all of it."),
        Option("--time", "LIMIT", "Time limit, such as 2-12:00:00. Default: that of the partition."),
        Option("--partition", "NAME", "Partition, or several with commas."),
        Option("--account", "NAME", "Account that the job is charged to."),
        Option("--job-name", "NAME", "Name of the job. Default: that of the script."),
        Option(
            "--max-requeues",
            "N",  # slurm.MAX_REQUEUES, not imported here
            "How often the job is requeued at most, after a time limit or a lost node.  [default: 10]",
            click.IntRange(0, 1000),
            default=10,
        ),
        Option(
            "--setup setup",
            "COMMAND",
            "Run this in the script's shell before the ranks start: 'module load cuda', '. "
            ".venv/bin/activate'.",
            multiple=True,
        ),
        Option(
            "--sbatch extra",
            "OPTION",
            "One more option of sbatch, such as --qos=high or --constraint=a100.",
            multiple=True,
        ),
        Option(
            "-o --output",
            "FILE",
            "Write the script to this file. Default: stdout.",
            click.Path(dir_okay=False),
        ),
        *variables("where the job is submitted", " The script has their values."),
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

export = LazyGroup(
    "export",
    listed(slurm),
    help="""\
Write the same job as a script for another launcher.

Contacts no AWS service and needs no cluster.
""",
)
