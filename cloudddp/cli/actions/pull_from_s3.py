"""`pull` of a job whose cluster no longer exists: the results that its nodes have copied to Amazon S3."""

from __future__ import annotations

from cloudddp.agent.protocol.checkpoints import Checkpoints
from cloudddp.agent.protocol.copies import CopyPhase
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.errors import CloudDDPError, q
from cloudddp.job import project_files
from cloudddp.job.launch_record import LaunchRecord, s3_destination_of
from cloudddp.job.results import s3_pull
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.s3_pull import NodeObjects
from cloudddp.job.results.safe_names import LOGS
from cloudddp.operations.results import (
    PROJECT_ROOT,
    PullRequest,
    merge_checkpoints,
    raise_incomplete,
    raise_left_out,
    raise_missing,
    report_pulled,
    write_report,
)
from cloudddp.text import node_list, one_line


def pull_from_s3(console: Console, session: Session, record: LaunchRecord, wanted: PullRequest) -> None:
    """Copy the outputs of a job, and without paths its logs. Raises CloudDDPError if there
    is nothing."""
    place = s3_destination_of(record.config, record.job)
    if place is None:
        raise CloudDDPError(f"the nodes of job {record.job} were not told to copy its results to S3")
    console.log(f"the nodes of job {record.job} have gone: reading {place.url}")
    aws = session.account.aws()
    found = s3_pull.find(aws, place)
    lacking = _report_state(console, found)
    zero = next((number for number, one in found.items() if one.report.rank_zero), min(found, default=0))
    base = wanted.to or session.root / project_files.RESULTS / record.job
    targets = wanted.targets(found, zero, found[zero].outputs if zero in found else (), base)
    known = Checkpoints({number: found[number].report.checkpoints for number in targets if number in found})
    names, files = wanted.paths or record.config.job.outputs or (PROJECT_ROOT,), 0
    outputs: dict[int, Pulled] = {}
    for number, target in targets.items():
        objects = found.get(number, NodeObjects()).outputs
        outputs[number] = s3_pull.fetch(aws, place, objects, names, node=number, to=target, known=known)
        report_pulled(console, console.print_text, number, outputs[number], target)
        files += outputs[number].files
    for number, one in found.items() if not wanted.paths else ():
        logs = base / LOGS / f"node{number}"
        pulled = s3_pull.fetch(aws, place, one.logs, [PROJECT_ROOT], node=number, to=logs)
        report_pulled(console, console.print_text, number, pulled, logs)
        files += pulled.files
    if files and not wanted.paths:
        write_report(console, record.job, base)
    if not files and all(output.is_empty and not output.notes for output in outputs.values()):
        what = "files" if names == (PROJECT_ROOT,) else " or ".join(names)
        hint = f"look with `aws s3 ls --recursive {q(place.url)}`"
        if len(found) > 1 and not wanted.all_nodes:
            hint = "--all-nodes copies those of all nodes"
        where = f"of node {min(targets, default=zero)} in {place.url}"
        raise CloudDDPError(f"nothing to pull: no {what} {where}", hint=hint)
    incomplete = merge_checkpoints(console, base, targets, known, known, outputs)
    raise_left_out(outputs, place.url)
    if wanted.paths:
        raise_missing(outputs)
    if lacking:
        raise CloudDDPError(
            f"{place.url} does not have all results of {node_list(lacking)}",
            hint="what was there is pulled; what the nodes had not copied is gone with them",
        )
    raise_incomplete(incomplete, all_nodes=wanted.all_nodes)


def _report_state(console: Console, found: dict[int, NodeObjects]) -> list[int]:
    """Warn of nodes that have not copied everything, as they have reported it; return them."""
    reports = {number: one.report for number, one in found.items()}
    lacking = {number: one for number, one in reports.items() if one.phase is not CopyPhase.COMPLETE}
    for number, one in lacking.items():
        if one.phase is CopyPhase.COPYING:
            console.warn(f"node {number} ended before it had copied everything")
        else:
            why, of = one.error or "; ".join(one.notes), f"{one.files} of {one.expected} files"
            console.warn(f"node {number} has copied {of}: {one_line(why, 500)}")
    return list(lacking)
