"""A job's results: pulled before its nodes are terminated, and reported if not. The nodes record what was
pulled; `run` terminates them only when they report that nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloudddp import signals
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import Checkpoints, refusal
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.results import EVIDENCE, NewFilesReply, PulledRequest
from cloudddp.cluster import lookup
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.lookup import EndedNode
from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError, Message, q
from cloudddp.formats import from_here, plural
from cloudddp.job import launch_record, project_files
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.report import page
from cloudddp.job.results import checkpoints, new_files
from cloudddp.job.results.new_files import names_of
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.job.results.receive import Progress
from cloudddp.job.results.safe_names import INCOMPLETE, LOGS
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.account import Account
from cloudddp.operations.byte_progress import ByteProgress
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.results_on_nodes import line_of, pull_command, report_lost
from cloudddp.operations.session import Session
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import node_list, one_line, reason_of, size_of, some

PROJECT_ROOT = "."  # what is pulled where no outputs are configured
SHOWN = 5  # files that were left out


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What `pull` was asked to copy: by default the outputs of the job, to results/JOB in the project."""

    paths: Sequence[str]
    node: int | None
    all_nodes: bool
    to: Path | None

    def targets(
        self, nodes: Iterable[int], zero: int, written: Iterable[str], folder: Path
    ) -> dict[int, Path]:
        """Return where the files of each chosen node go, as `folders_of`. `zero`: the node of rank 0, which
        has `written` these names. The files of one node go into `to` itself."""
        chosen = nodes if self.all_nodes else [zero if self.node is None else self.node]
        if self.to is not None and not self.all_nodes:
            return dict.fromkeys(chosen, self.to)
        return folders_of(chosen, zero, (*self.paths, *written), folder)


@dataclass(frozen=True, slots=True)
class Unpulled:
    """What the nodes still hold, one line per node, and the command that pulls it."""

    lines: tuple[str, ...] = ()
    pull: str = Message("`cloudddp pull`")
    incomplete: tuple[str, ...] = ()  # checkpoints that were pulled, and why


def ended_reports(account: Account, cluster: Cluster) -> dict[int, str]:
    """Return what AWS reports about nodes that have ended, on a new connection. Any thread may call it."""
    ended = lookup.ended_nodes(account.aws(), cluster, cluster.nodes, stopped=True)
    return {node: one.report for node, one in ended.items()}


def collect(
    session: Session[Reporter], runner: Runner, cluster: Cluster, job_id: str, finished: JobResult | None
) -> Unpulled:
    """Pull a job's outputs and logs from every node, and return what is left there, with the reasons. Nodes
    that were doubtful when it `finished`, and are gone, are not asked: a connection to a machine that has
    failed waits until its timeout. Nodes that the runner does not reach count as left."""
    console, job = session.console, session.settings.job
    to = session.root / project_files.RESULTS / job_id
    first = not to.exists()
    ended: dict[int, EndedNode] = {}
    if finished is not None and finished.doubtful:
        checking = signals.protected(lambda: console.log("checking the nodes for results first"))
        with checking, contextlib.suppress(CloudDDPError):  # also where the credentials cannot be loaded
            ended = lookup.ended_nodes(session.account.aws(finishing=True), cluster, finished.doubtful)
    try:
        runner.leave_out([node for node in runner.nodes if node in ended and ended[node].gone])
        found = new_files.find_all(runner, job, job_id).values
        report_lost(console, found)
        having = [node for node, reply in found.items() if reply.outputs]
        zero = min((node for node in having if found[node].rank_zero), default=None)
        written = () if zero is None else names_of(found[zero].outputs)
        folders = folders_of(having, zero, written, to)
        # Named as in our settings: a node chooses the names in its answer.
        there = {node: names_of(found[node].outputs) for node in folders}
        whole = job.outputs or (PROJECT_ROOT,)
        wanted = {
            node: [name for name in job.outputs if os.path.normpath(name) in names] or whole
            for node, names in there.items()
        }
        results = JobResults(session, runner, cluster, job_id, to, folders, found, wanted)
        results.pull(console.log)
        after = new_files.find_all(runner, job, job_id)
    except KeyboardInterrupt:
        return Unpulled(("interrupted while results were pulled: some of them are missing",))
    incomplete = results.complete(after.values)
    lines = [
        f"node {node}: results were not pulled: {one_line(str(error), 500)}"
        for node, error in sorted(results.outcome.errors.items())
    ]
    for node in sorted(cluster.nodes.keys() - after.values.keys()):
        if node in ended:
            console.warn(f"node {node} has ended, and its files are lost")
        else:
            why = f": {after.errors[node]}" if node in after.errors else ""
            lines.append(f"node {node} did not answer, so its files are unknown{why}")
    for line in incomplete:
        console.warn(line)
    if first and not (folders or lines or ended):
        to_outputs = f"nothing to {', '.join(job.outputs)} (job.outputs)"
        wrote = to_outputs if job.outputs else "no files in the project"
        console.log(f"no results: the job wrote {wrote}")
    held = new_files.by_node(after.values)
    command = pull_command(held, [new for one in held.values() for new in one.others])
    return Unpulled((*lines, *(line_of(*item) for item in held.items())), command, incomplete)


@dataclass
class JobResults:
    """The results of a job on these nodes, each of which has a folder, `to` or one below it. `replies`: what
    was not pulled before. `wanted`: what is copied of each node, with `everything` not only what jobs wrote.
    `splits`: files of another job go to the folder of that one. `outcome`: of the pull."""

    session: Session[Reporter]
    runner: Runner
    cluster: Cluster
    job: str
    to: Path
    folders: Mapping[int, Path]
    replies: Mapping[int, NewFilesReply]
    wanted: Mapping[int, Sequence[str]]
    everything: bool = False
    splits: bool = True
    outcome: Outcome[Pulled] = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.known = checkpoints.on(self.folders, self.replies)
        records = ClusterFolder(self.cluster.id), self.session.root
        self._jobs = launch_record.jobs_of(*records) if self.splits else []

    def pull(self, show: Callable[[str], object]) -> None:
        """Pull what is wanted, tell the nodes, and `show` what has come."""
        runner, job, selection = self.runner, self.session.settings.job, None
        if not (self.everything or job.outputs):
            selection = new_files.request(runner, job, self.job)
        results_of = self.job if self.splits else ""

        def pull_one(node: int, progress: Progress) -> Pulled:
            names, to = tuple(self.wanted[node]), self.folders[node]
            request = PackRequest(
                PROJECT, names, all=self.everything, selection=selection, results_of=results_of
            )
            places = {job: self._folder_of(job, node) for job in self._jobs}
            pulled = pull(
                runner, request, node=node, to=to, progress=progress, places=places, known=self.known
            )
            if pulled.left is not None and not pulled.is_empty and node in self.replies:
                time_ns = self.replies[node].time_ns
                client.call(runner, node, PulledRequest(PROJECT, request.paths, time_ns, pulled.left))
            return pulled

        self.outcome = pull_from(self.session.console, runner, self.folders, pull_one)
        for node, pulled in sorted(self.outcome.values.items()):
            report_pulled(self.session.console, show, node, pulled, self.folders[node])

    def complete(self, after: Mapping[int, NewFilesReply]) -> tuple[str, ...]:
        """Merge checkpoints as `merge_checkpoints`, and unless the user has named files pull the logs, also
        those of the other jobs whose files came with these. `after`: what the nodes have after the pull."""
        console, now = self.session.console, checkpoints.on(self.folders, after)
        incomplete = merge_checkpoints(console, self.to, self.folders, self.known, now, self.outcome.values)
        if self.everything:
            return incomplete
        collect_logs(console, self.runner, self.job, self.to)
        # The folders of other jobs, also of earlier ones that have left nothing on the nodes but their logs.
        runner, pulled = self.runner, self.outcome.values
        chosen = [job for job in self._jobs if job < self.job and not (self.to.parent / job).exists()]
        if chosen:
            found = new_files.find_all(runner, self.session.settings.job).values
            replies = found.values()
            is_known = len(found) == len(self.cluster.nodes) and all(reply.complete for reply in replies)
            held = {one.job for reply in replies for one in reply.jobs}
            chosen = [job for job in chosen if is_known and job not in held]
        for job in self._jobs:
            base = self.to.parent / job
            if files := sum(one.others.get(job, 0) for one in pulled.values()):
                console.log(f"of these, {plural(files, 'file')} of job {job}: {from_here(base)}")
                folders = {node: self._folder_of(job, node) for node in pulled}
                own = {node: replace(one, incomplete=()) for node, one in pulled.items()}
                merge_checkpoints(console, base, folders, self.known.written_by(job), now, own)
            elif job not in chosen:
                continue
            with contextlib.suppress(OSError):
                base.mkdir(parents=True)
            collect_logs(console, runner, job, base)
        return incomplete

    def _folder_of(self, job: str, node: int) -> Path:
        return self.to.parent / job / self.folders[node].relative_to(self.to)


def report_pulled(
    console: Reporter, show: Callable[[str], object], node: int, pulled: Pulled, target: Path
) -> None:
    """Warn of what was left out, and `show` what has come."""
    for line in pulled.notes:
        console.warn(f"node {node}: {line}")
    if pulled.found:
        same = f" ({plural(pulled.unchanged, 'file')} unchanged)" if pulled.unchanged else ""
        what = f"node {node}: {plural(pulled.files, 'file')}, {size_of(pulled.size)}"
        show(f"{what} -> {from_here(target)}{same}")


def pull_from(
    console: Reporter, runner: Runner, nodes: Iterable[int], work: Callable[[int, Progress], Pulled]
) -> Outcome[Pulled]:
    """Pull from these nodes at the same time; every node has its result or its error. Where a connection
    breaks, connect once more and continue."""

    def one(node: int) -> Pulled:
        with shown.of(node) as progress:
            return client.repeated(runner, lambda node: work(node, progress))(node)

    with ByteProgress(console) as shown:
        return runner.each(one, nodes=nodes, fatal=lambda _: False)


def merge_checkpoints(
    console: Reporter,
    base: Path,
    folders: Mapping[int, Path],
    known: Checkpoints,
    after: Checkpoints,
    pulled: Mapping[int, Pulled],
) -> tuple[str, ...]:
    """Merge each complete checkpoint whose files are on several nodes into one folder below `base`, and
    record all. Return why the others that were pulled are incomplete, one line each. Never fails."""
    incomplete = {
        folder: [folders[node] for node, one in sorted(pulled.items()) if folder in one.incomplete]
        for folder in dict.fromkeys(folder for one in pulled.values() for folder in one.incomplete)
    }
    changed = known.changed(after)
    try:
        for folder in [one for one in changed if one not in incomplete and not known.problems[one]]:
            known.problems[folder] = "a job wrote it while it was pulled"
            incomplete[folder] = [folders[node] for node in pulled]
            for node in pulled:
                checkpoints.move_to_incomplete(folders[node], folder)
        merged = checkpoints.merge_shards(base, {node: folders[node] for node in pulled}, known)
        for path in merged[:SHOWN]:
            console.log(f"{base / one_line(path, 200)} has the files of all nodes")
        if base.is_dir():
            checkpoints.record(base, known, incomplete)
    except OSError as error:
        console.warn(f"{base}: checkpoints were not merged: {error}")
    return tuple(
        f"{one_line(refusal(folder, known.problems), 1000)}. Its files are in "
        + " and ".join(str(from_here(place / INCOMPLETE)) for place in places[:SHOWN])
        for folder, places in incomplete.items()
        if folder in known.incomplete()
    )


def raise_incomplete(incomplete: Sequence[str], *, all_nodes: bool) -> None:
    """Raise CloudDDPError where checkpoints that were pulled are incomplete, of all nodes or of some."""
    if incomplete:
        hint = "`cloudddp pull --all-nodes` completes a checkpoint if the other nodes have the rest"
        raise CloudDDPError("\n".join(incomplete), hint="" if all_nodes else Message(hint))


def raise_left_out(pulled: Mapping[int, Pulled], place: str = "") -> None:
    """Raise CloudDDPError where results were not copied, which was reported. `place`: of those in S3."""
    found = [node for node, one in sorted(pulled.items()) if one.left is None or one.left]
    if found:
        names = [one.name for node in found for one in pulled[node].left or ()]
        listed = some([one_line(name, 200) for name in names], SHOWN) or "too many files to name"
        hint = f"the nodes keep these files until they terminate; `cloudddp ssh {q(found[0])}` looks at them"
        if place:
            hint = f"these files stay in {place}"
        raise CloudDDPError(
            f"{node_list(found)}: not all results were copied: {listed}",
            hint=Message(f"the warnings above say why; {hint}"),
        )


def raise_missing(pulled: Mapping[int, Pulled]) -> None:
    """Raise CloudDDPError where a requested path is on none of the nodes."""
    if missing := sorted(frozenset.intersection(*(one.missing for one in pulled.values()))):
        raise CloudDDPError(
            f"{node_list(pulled)}: not there: {some([one_line(name, 200) for name in missing], SHOWN)}",
            hint="PATHS are files and folders of the project on the nodes; the others were pulled",
        )


def collect_logs(console: Reporter, runner: Runner, job_id: str, to: Path) -> None:
    """Pull a job's logs, verdict and dumps from every node into `to`/cloudddp-logs, and write the report of
    the job beside them. Never fails: they explain how a job ended, and are not its results."""

    def pull_one(node: int, progress: Progress) -> Pulled:
        folder = to / LOGS / f"node{node}"
        return pull(runner, PackRequest(PROJECT, EVIDENCE, job_id), node=node, to=folder, progress=progress)

    outcome = pull_from(console, runner, runner.nodes, pull_one)
    for node, error in sorted(outcome.errors.items()):
        console.warn(f"node {node}: its logs were not pulled: {one_line(str(error), 500)}")
    for node, pulled in sorted(outcome.values.items()):
        report_pulled(console, lambda _: None, node, pulled, to)
    if files := sum(value.files for value in outcome.values.values()):
        size = size_of(sum(value.size for value in outcome.values.values()))
        console.log(f"logs: {plural(files, 'file')}, {size}, to {from_here(to / LOGS)}")
    write_report(console, job_id, to)


def write_report(console: Reporter, job_id: str, folder: Path) -> None:
    """Write the report of a job into the folder of its results. Never fails."""
    try:
        console.log(f"report: {from_here(page.write(page.Evidence.of(job_id, folder)))}")
    except Exception as error:  # also a bug: the results are here
        console.warn(f"the report of job {job_id} was not written: {reason_of(error)}")


def folders_of(nodes: Iterable[int], zero: int | None, written: Iterable[str], to: Path) -> dict[int, Path]:
    """Return where the results of these nodes go: `to` for rank 0's node, `zero`, unless it has `written` a
    name like that of a node's folder, now or at an earlier pull; a folder of their own for the others."""
    folders = {node: to / f"node{node}" for node in nodes}
    collides = any(re.fullmatch(r"node\d+", name.partition("/")[0], re.IGNORECASE) for name in written)
    if zero in folders and not collides and not folders[zero].exists():
        folders[zero] = to
    return folders
