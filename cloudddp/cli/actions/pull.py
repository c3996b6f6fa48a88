"""`pull`: copy results from the nodes to this computer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cloudddp import local_state
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.cli.actions.pull_from_s3 import pull_from_s3
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cluster import lookup
from cloudddp.cluster.model import Cluster
from cloudddp.config import project
from cloudddp.errors import CloudDDPError, NodeError, UsageError, q
from cloudddp.files import resolved
from cloudddp.formats import toml
from cloudddp.job import launch_record, project_files, status
from cloudddp.job.results import new_files, safe_names
from cloudddp.job.results import pull as pulling
from cloudddp.job.results.new_files import names_of
from cloudddp.operations.node_connections import reachable
from cloudddp.operations.results import (
    PROJECT_ROOT,
    JobResults,
    PullRequest,
    raise_incomplete,
    raise_left_out,
    raise_missing,
)
from cloudddp.operations.results_on_nodes import report_held
from cloudddp.text import one_line


def pull(
    console: Console,
    *,
    paths: Sequence[str],
    job_id: str | None,
    node: int | None,
    all_nodes: bool,
    to: Path | None,
) -> None:
    if job_id is None and len(paths) == 1 and has_job_id_format(paths[0]):
        (job_id,), paths = paths, ()  # as other verbs take it
    session = start_session(console, tolerant_verb="pull")
    wanted = PullRequest(paths, node, all_nodes, to)
    safe_names.requested(paths)
    pulling.check_target(to or session.root / project_files.RESULTS)
    if to is not None and not (paths or session.settings.job.outputs):
        _check_whole(to, session.root)
    try:
        _pull(console, session, wanted, job_id)
    except (lookup.NoCluster, status.UnknownJob):
        folders = local_state.folders_of(session.settings.cluster.name, session.account.aws().endpoint)
        record = launch_record.in_s3(folders, job_id)
        if record is None:
            raise
        pull_from_s3(console, session, record, wanted)


def _check_whole(to: Path, root: Path) -> None:
    """Raise UsageError for a folder with files that a node could replace, where it may send any name."""
    folder = resolved(to)
    what = "the project's folder" if folder == resolved(root) else project.holds_more(folder)
    if resolved(root).is_relative_to(folder) or what:
        raise UsageError(
            f"cannot write all results to {to}: the nodes choose their names, which could be those of "
            f"files in {what or 'a folder that contains the project'}",
            hint=f"name what you need: `cloudddp pull --to {q(to)} PATH`; or choose another folder",
        )


def _pull(console: Console, session: Session, wanted: PullRequest, job_id: str | None) -> None:
    """Copy results from the nodes."""
    job, paths = session.settings.job, wanted.paths
    required = None if wanted.all_nodes else [wanted.node] if wanted.node is not None else []
    with reachable(session, required=required) as (cluster, runner):
        known = status.list_jobs(runner)
        ran = [one for one in known if not one.setup]
        record = status.find(known if job_id is not None else ran or known, job_id)
        zero = record.rank_zero if record.rank_zero is not None else min(cluster.nodes)
        _check_answers(cluster, runner, zero, wanted)
        base = wanted.to or session.root / project_files.RESULTS / record.id
        names = paths or job.outputs or (PROJECT_ROOT,)
        replies = new_files.find_all(runner, job).values
        written = names_of(replies[zero].outputs) if zero in replies else ()
        targets = wanted.targets(runner.nodes, zero, written, base)
        results = JobResults(
            session,
            runner,
            cluster,
            record.id,
            base,
            targets,
            replies,
            dict.fromkeys(targets, names),
            everything=bool(paths),
            splits=not paths and wanted.to is None,
        )
        try:
            results.pull(console.print_text)
        except KeyboardInterrupt:
            console.log("what has arrived is kept; repeat the command to continue")
            raise
        incomplete: Sequence[str] = ()
        if results.outcome.values:
            after = new_files.find_all(runner, job).values if results.known.parts else {}
            incomplete = results.complete(after)
        for source, error in sorted(results.outcome.errors.items())[1:]:
            console.warn(f"node {source}: its results were not pulled: {one_line(str(error), 500)}")
        results.outcome.all()
        if all(pulled.is_empty for pulled in results.outcome.values.values()):
            report_held(console, replies, session.settings)
            raise _nothing_to_pull(names, job.outputs, running=None if record.status.ended else record.id)
        if not paths:
            others = {node: one for node, one in replies.items() if node not in targets}
            report_held(console, others, session.settings)
        raise_left_out(results.outcome.values)
        if paths:
            raise_missing(results.outcome.values)
        raise_incomplete(incomplete, all_nodes=wanted.all_nodes)
        if record.id != (ran or known)[-1].id and not paths:
            console.warn(f"{record.id} is not the newest job: later ones may have changed these files")


def _check_answers(cluster: Cluster, runner: Runner, zero: int, wanted: PullRequest) -> None:
    """Raise NodeError if the only node that is pulled from does not answer: --node, or the one of rank 0."""
    only = zero if wanted.node is None else wanted.node
    cluster.require_node(only)
    if only not in runner.nodes and not wanted.all_nodes:
        what = ", which has the results of rank 0," if only == zero else ""
        hint = "copy those of another node with `cloudddp pull --node N`"
        raise NodeError(f"node {only}{what} does not answer", hint=hint)


def _nothing_to_pull(names: Sequence[str], outputs: Sequence[str], *, running: str | None) -> CloudDDPError:
    what = f": no {' or '.join(names)} on the nodes"
    hint = "give PATHS of the project on the nodes, or set [job] outputs in cloudddp.toml "
    hint += f"(now {toml(outputs)}) to where the script writes"
    if running and list(names) in ([PROJECT_ROOT], list(outputs)):
        where = " or ".join(outputs) or "the project"
        what = f" yet: job {running} is running and has not written any files in {where}"
        hint = "see its progress: `cloudddp logs -f` or `cloudddp stacks`"
    elif list(names) == [PROJECT_ROOT]:
        what = ": the jobs wrote no files in the project"
        hint = "files elsewhere on a node: `cloudddp exec -- cp -r FOLDER .` first"
    return CloudDDPError(f"nothing to pull{what}", hint=hint)
