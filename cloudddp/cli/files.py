"""The verbs on files and nodes: init, sync, pull, exec, ssh."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from cloudddp.cli.common import Session, verb
from cloudddp.cli.say import Progress, counted, note, size


@verb("init")
@click.argument("folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--example", type=click.Choice(["digits"]), help="Copy a training project, too.")
def init(_: Session, folder: Path, example: str | None) -> None:
    """Write a commented cloudddp.toml, and on request an example project, into FOLDER.

    \b
    Example:
      cloudddp init --example digits my-project
    """
    from cloudddp import payload
    from cloudddp.cli import reference
    from cloudddp.errors import UsageError
    from cloudddp.settings import CONFIG_NAME

    config, code = folder / CONFIG_NAME, folder / "train"
    taken = [path for path in (config, *([code] if example else [])) if path.exists()]
    if taken:
        raise UsageError(
            f"{taken[0]} exists already; nothing was written", hint="choose another folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(reference.example_toml(reference.name_for(folder)))
    click.echo(f"wrote {config}")
    ignored = folder / ".gitignore"
    if not ignored.exists():
        ignored.write_text("/runs/\n/results/\n")
    if example:
        shutil.copytree(payload.example(), code, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        click.echo(f"wrote {code}{os.sep}")
        there = "" if folder.resolve() == Path.cwd().resolve() else f"cd {folder} && "
        note(
            f"next: {there}cloudddp --sim up && cloudddp --sim launch --nproc-per-node 2 -m train.main --dataset digits"
        )


@verb("sync")
def sync(session: Session) -> None:
    """Bring the project's files to every node, as `launch` does first."""
    from cloudddp import job

    settings = session.settings()
    with session.open(settings) as (cluster, runner), Progress() as say:
        job.sync_only(runner, cluster, settings, root=session.root, say=say)


@verb("pull")
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
    from cloudddp import job, results
    from cloudddp.errors import CloudDDPError

    settings = session.settings()
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
        for source in sources:
            target = base / f"node{source}" if all_nodes else base
            since = None if paths else record.started
            pulled = results.pull(runner, names, node=source, to=target, since=since)
            total += pulled.files
            for line in pulled.notes:
                note(f"warning: node {source}: {line}")
            if pulled.files:
                click.echo(f"node {source}: {counted(pulled.files, 'file')}, {size(pulled.size)} -> {target}")
            if pulled.older:
                note(
                    f"warning: {pulled.older} of them {'is' if pulled.older == 1 else 'are'} older than job {record.id}: "
                    "jobs share the folder, so these may be an earlier job's"
                )
        if record.id != known[-1].id and total and not paths:
            note(f"warning: {record.id} is not the newest job: later ones may have changed these files")
        if not total:
            raise CloudDDPError(
                f"nothing to pull: no {' or '.join(names)} on the nodes", hint="see job.outputs"
            )


@verb("exec", passes_arguments=True)
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
            lambda rank: runner.run(rank, inside, command_timeout=None) if node in (None, rank) else None,
            fatal=lambda _: False,
        )
    worst = 0
    for rank, result in sorted(outcome.values.items()):
        if result is None:
            continue
        worst = max(worst, result.exit_code)
        for stream, err in ((result.stdout, False), (result.stderr, True)):
            for line in stream.decode(errors="replace").splitlines():
                click.echo(f"[node {rank}] {line}", err=err)
        if result.exit_code:
            note(f"node {rank}: exit code {result.exit_code}")
    outcome.all()
    return worst


@verb("ssh", passes_arguments=True)
@click.argument("node", type=int, default=0)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(session: Session, node: int, command: tuple[str, ...]) -> None:
    """Log in to a node (0 by default) with OpenSSH, its host key checked as strictly as by cloudddp."""
    from cloudddp import cluster
    from cloudddp.errors import CloudDDPError
    from cloudddp.state import ClusterFolder, write_atomic

    settings = session.settings()
    found = cluster.get(session.aws(settings), settings.cluster.name)
    targets = cluster.targets(found, settings.cluster)
    if node not in targets:
        raise CloudDDPError(f"there is no node {node}", hint=f"nodes: 0 to {len(targets) - 1}")
    program = shutil.which("ssh")
    if program is None:
        raise CloudDDPError(
            "OpenSSH's `ssh` is not installed", hint="install openssh-client; `cloudddp exec` needs none"
        )
    target = targets[node]
    known = ClusterFolder(found.id).known_hosts
    names = [(t.host if t.port == 22 else f"[{t.host}]:{t.port}", t.host_key) for t in targets.values()]
    write_atomic(known, "".join(f"{name} {key}\n" for name, key in names))
    options = ["StrictHostKeyChecking=yes", f"UserKnownHostsFile={known}", "IdentitiesOnly=yes"]
    argv = [program, "-i", str(target.private_key), "-p", str(target.port)]
    argv += [word for option in options for word in ("-o", option)]
    os.execv(program, [*argv, f"{target.user}@{target.host}", *command])  # noqa: S606  no shell


COMMANDS = (init, sync, pull, exec_, ssh)
