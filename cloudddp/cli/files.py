"""The verbs on files and nodes: init, sync, pull, exec, ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudddp.cli.common import Session, anyone_option, verb
from cloudddp.cli.say import Progress, counted, note, toml
from cloudddp.text import one_line, size_of, without_colours

if TYPE_CHECKING:
    from cloudddp.nodes import Runner


@verb("init")
@click.argument("folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--example", type=click.Choice(["digits"]), help="Copy a training project, too.")
def init(_: Session, folder: Path, example: str | None) -> None:
    """Write a commented cloudddp.toml, and on request an example project, into FOLDER.

    \b
    Example:
      cloudddp init --example digits my-project
    """
    from cloudddp.errors import UsageError
    from cloudddp.safe_files import resolved
    from cloudddp.settings import CONFIG_NAME

    config, code = folder / CONFIG_NAME, folder / "train"
    try:
        taken = [path for path in (config, *([code] if example else [])) if path.exists()]
        if taken:
            raise UsageError(
                f"{taken[0]} exists already; nothing was written", hint="choose another folder, or remove it"
            )
        _write_project(folder, config, code if example else None)
    except OSError as error:
        at = error.filename or folder
        raise UsageError(
            f"{at} cannot be written: {one_line(str(error.strerror or error), 200)}",
            hint="choose another folder: cloudddp init FOLDER",
        ) from None
    if example:
        there = "" if resolved(folder) == resolved(Path.cwd()) else f"cd {folder} && "
        note(f"next: {there}cloudddp --sim up && cloudddp --sim launch -m train.main --dataset digits")


def _write_project(folder: Path, config: Path, code: Path | None) -> None:
    from cloudddp import payload
    from cloudddp.cli import reference

    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(reference.example_toml(reference.name_for(folder)))
    click.echo(f"wrote {config}")
    ignored = folder / ".gitignore"
    if not ignored.exists():
        ignored.write_text("/runs/\n/results/\n")
        click.echo(f"wrote {ignored}")
    if code is not None:
        shutil.copytree(payload.example(), code, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        click.echo(f"wrote {code}{os.sep}")


@verb("sync")
@anyone_option
def sync(session: Session) -> None:
    """Bring the project's files to every node, as `launch` does first."""
    from cloudddp import job

    settings = session.settings()
    with session.open(settings) as (cluster, runner), Progress() as say:
        job.sync_only(runner, cluster, settings, root=session.root, say=say)


@verb("pull")
@anyone_option
@click.argument("paths", nargs=-1)
@click.option("--job", "job_id", metavar="JOB", help="The job whose results these are (default: the newest).")
@click.option("--node", type=int, metavar="K", help="Pull from this node (default: the one that ran rank 0).")
@click.option("--all-nodes", is_flag=True, help="Pull from every node, each into a folder of its own.")
@click.option(
    "--to", type=click.Path(file_okay=False, path_type=Path), help="Where to (default: results/JOB)."
)
def pull(
    session: Session,
    paths: tuple[str, ...],
    job_id: str | None,
    node: int | None,
    all_nodes: bool,
    to: Path | None,
) -> None:
    """Bring results back: PATHS of the project on the nodes (default: job.outputs, which is `runs`)."""
    from cloudddp import job, outputs, results
    from cloudddp.cli.collect import report_held
    from cloudddp.cluster import PROJECT
    from cloudddp.errors import CloudDDPError

    settings = session.settings()
    results.check_names(paths)
    results.check_target(to or session.root / job.RESULTS)
    with session.open(settings) as (cluster, runner):
        known = job.jobs(runner)
        record = job.find(known, job_id)
        count = len(cluster.nodes)
        if node is not None and not 0 <= node < count:
            raise CloudDDPError(f"there is no node {node}", hint=f"nodes: 0 to {count - 1}")
        sources = list(range(count)) if all_nodes else [node if node is not None else record.rank_zero or 0]
        base = to or session.root / job.RESULTS / record.id
        names = paths or settings.job.outputs
        total = 0
        replies = outputs.look(runner, settings.job, project=PROJECT).values
        for source in sources:
            target = base / f"node{source}" if all_nodes else base
            since = None if paths else record.started
            pulled = results.pull(runner, names, node=source, to=target, since=since)
            total += pulled.files
            if pulled.files and source in replies:
                outputs.mark(runner, source, names, replies[source].at, project=PROJECT)
            for line in pulled.notes:
                note(f"warning: node {source}: {line}")
            if pulled.files:
                click.echo(
                    f"node {source}: {counted(pulled.files, 'file')}, {size_of(pulled.size)} -> {target}"
                )
            if pulled.older:
                note(
                    f"warning: {pulled.older} of them {'is' if pulled.older == 1 else 'are'} older than job {record.id}: "
                    "jobs share the folder, so these may be an earlier job's"
                )
        if record.id != known[-1].id and total and not paths:
            note(f"warning: {record.id} is not the newest job: later ones may have changed these files")
        if not total:
            report_held(replies, settings)
            raise CloudDDPError(
                f"nothing to pull: no {' or '.join(names)} on the nodes",
                hint="give PATHS of the project on the nodes, or set [job] outputs in cloudddp.toml "
                f"(now {toml(settings.job.outputs)}) to where the script writes",
            )


@verb("exec", passes_arguments=True)
@anyone_option
@click.option("--node", type=int, metavar="K", help="On this node alone.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(session: Session, node: int | None, command: tuple[str, ...]) -> int:
    """Run COMMAND on every node, in the project's folder. Exits with the highest exit code.

    One word is taken as shell text, several as a command and its arguments.

    \b
    Examples:
      cloudddp exec -- nvidia-smi -L
      cloudddp exec --node 1 'df -h / | tail -1'
    """
    import shlex

    from cloudddp.cluster import PROJECT
    from cloudddp.errors import CloudDDPError

    settings = session.settings()
    text = command[0] if len(command) == 1 else shlex.join(command)
    with session.open(settings) as (cluster, runner):
        count = len(cluster.nodes)
        if node is not None and not 0 <= node < count:
            raise CloudDDPError(f"there is no node {node}", hint=f"nodes: 0 to {count - 1}")
        inside = f'cd "$HOME"/{PROJECT} 2>/dev/null || cd; {text}'
        outcome = runner.each(
            lambda rank: _execute(runner, rank, inside) if node in (None, rank) else None,
            fatal=lambda _: False,
        )
    worst = 0
    for rank, code in sorted(outcome.values.items()):
        worst = max(worst, code or 0)
        if code:
            note(f"node {rank}: exit code {code}")
    outcome.all()
    return worst


def _execute(runner: Runner, node: int, command: str) -> int:
    """Run a command on a node and print its lines as they come, each whole; return its exit code."""
    from cloudddp.frames import Lines

    out, err = Lines(), Lines()

    def show(lines: Iterable[str], *, err: bool) -> None:
        for line in lines:
            click.echo(f"[node {node}] {without_colours(line)}", err=err)

    result = runner.run(
        node,
        command,
        command_timeout=None,
        on_stdout=lambda data: show(out.feed(data), err=False),
        on_stderr=lambda data: show(err.feed(data), err=True),
    )
    show(out.feed(b"", last=True), err=False)
    show(err.feed(b"", last=True), err=True)
    return result.exit_code


@verb("ssh", passes_arguments=True)
@anyone_option
@click.argument("node", type=int, default=0)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(session: Session, node: int, command: tuple[str, ...]) -> None:
    """Log in to a node (0 by default) with OpenSSH, its host key checked as strictly as by cloudddp.

    Your own ssh configuration is not read: neither your SSH agent nor a port is forwarded to the node.
    """
    from cloudddp import cluster
    from cloudddp.errors import CloudDDPError
    from cloudddp.state import ClusterFolder, write_atomic

    settings = session.settings()
    aws = session.aws(settings)
    found = cluster.get(aws, settings.cluster.name, session.ownership(aws))
    if not 0 <= node < len(found.nodes):
        raise CloudDDPError(f"there is no node {node}", hint=f"nodes: 0 to {len(found.nodes) - 1}")
    program = shutil.which("ssh")
    if program is None:
        raise CloudDDPError(
            "OpenSSH's `ssh` is not installed", hint="install openssh-client; `cloudddp exec` needs none"
        )
    cluster.finish_host_keys(found, settings.cluster, say=note)
    targets = cluster.targets(found, settings.cluster)
    target = targets[node]
    target.require_host_key()
    known = ClusterFolder(found.id).known_hosts
    write_atomic(known, "".join(f"{t.known_as} {key}\n" for t in targets.values() for key in t.host_keys))
    known_only = [f"UserKnownHostsFile={known}", "GlobalKnownHostsFile=none"]
    options = ["StrictHostKeyChecking=yes", *known_only, "IdentitiesOnly=yes"]
    # -F none: a `ForwardAgent yes` for every host would lend the user's keys to the node, which is not trusted.
    argv = [program, "-F", "none", "-i", str(target.private_key), "-p", str(target.port)]
    argv += [word for option in options for word in ("-o", option)]
    os.execv(program, [*argv, f"{target.user}@{target.host}", *command])  # noqa: S606  no shell


COMMANDS = (init, sync, pull, exec_, ssh)
