"""The command line: click and nothing else of substance. Verbs live in one module a family.

These modules are imported for `--help`, so they import only click and each other at their top; what a verb needs
(boto3, paramiko, moto, rich) is imported inside it.
"""

from __future__ import annotations

import click

from cloudddp import __version__
from cloudddp.cli import clusters, files, jobs, run, simulator
from cloudddp.cli.common import CONTEXT, Session, global_options


@click.group(context_settings=CONTEXT)
@global_options
@click.version_option(__version__, "--version", prog_name="cloudddp")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A training script, on N GPU nodes of your own AWS account; the bill stops when the job does.

    \b
      cloudddp init --example digits   a project to start from
      cloudddp --sim up                try it on this computer, without AWS
      cloudddp up                      nodes ready to train
      cloudddp launch -m train.main    ranks on all of them, logs here
      cloudddp down                    nothing left, nothing billed
    """
    ctx.ensure_object(Session)


for _command in (*clusters.COMMANDS, *jobs.COMMANDS, *run.COMMANDS, *files.COMMANDS, simulator.sim):
    main.add_command(_command)
