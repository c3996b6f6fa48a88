"""A job's results: pulled before its nodes are terminated, and reported if they were not pulled.

The nodes record what was pulled and what was left out, and why. `run` terminates nodes only when they report
that nothing is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import Checkpoints, listed, refusal
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.results import EVIDENCE, NewFilesReply
from cloudddp.cluster import lookup
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.lookup import EndedNode
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import CloudDDPError, Message, UsageError, inert, q
from cloudddp.formats import counted, from_here, toml
from cloudddp.job import launch_record, project_files
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.results import checkpoints, new_files, safe_names
from cloudddp.job.results.new_files import names_of
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.job.results.receive import Progress
from cloudddp.job.results.safe_names import INCOMPLETE, LOGS
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.byte_progress import ByteProgress
from cloudddp.operations.report import write_report
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import node_list, one_line, size_of, some

PULL = Message("`cloudddp pull`")
PROJECT_ROOT = "."  # what is pulled where no outputs are configured
SHOWN = 5  # files that were left out


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What `pull` was asked to copy. Without `paths`, the outputs of the job; `to` None: results/JOB in the
    project."""

    paths: Sequence[str]
    node: int | None
    all_nodes: bool
    to: Path | None

    def folder(self, root: Path, job_id: str) -> Path:
        return self.to or root / project_files.RESULTS / job_id

    def targets(self, nodes: Iterable[int], first: int, folder: Path) -> dict[int, Path]:
        """Return where the files of each node go: with `all_nodes` into a folder each, else only those of
        `first`."""
        return {node: folder / f"node{node}" for node in nodes} if self.all_nodes else {first: folder}


@dataclass(frozen=True, slots=True)
class Left:
    """What the nodes still hold, one line per node, and the command that pulls it."""

    lines: tuple[str, ...] = ()
    pull: str = PULL
    incomplete: tuple[str, ...] = ()  # checkpoints that were pulled, and why


def ended_nodes(
    session: Session[Reporter], cluster: Cluster, finished: JobResult | None
) -> dict[int, EndedNode]:
    """Return what AWS reports about those nodes of a job that were doubtful at its end, and have ended;
    nothing if AWS cannot be asked."""
    if finished is not None and finished.doubtful:
        with contextlib.suppress(CloudDDPError):  # also where the credentials can no longer be loaded
            return lookup.ended_nodes(session.aws(finishing=True), cluster, finished.doubtful)
    return {}


def ended_reports(session: Session[Reporter], cluster: Cluster) -> dict[int, str]:
    """Return what AWS reports about nodes that have ended, on a new connection. Any thread may call it."""
    ended = lookup.ended_nodes(session.aws(), cluster, cluster.nodes, stopped=True)
    return {node: one.report for node, one in ended.items()}


def collect(
    session: Session[Reporter], runner: Runner, cluster: Cluster, job_id: str, ended: Mapping[int, EndedNode]
) -> Left:
    """Pull a job's outputs from every node, and return what is left there, with the reasons.

    The files of nodes that have `ended` are lost, unless they still answer. Those that are gone are not
    asked: a connection to a machine that has failed waits for an answer until its timeout. Nodes of the
    cluster that the runner does not reach are reported as left.
    """
    console, job = session.console, session.settings.job
    to = session.root / project_files.RESULTS / job_id
    first = not to.exists()
    lines: list[str] = []
    try:
        runner.leave_out([node for node in runner.nodes if node in ended and ended[node].gone])
        silent = {node: "" for node in cluster.nodes if node not in runner.nodes}
        found = new_files.find_all(runner, job, job_id=job_id, retry=True)
        silent |= {node: f": {error}" for node, error in found.errors.items()}
        for node, why in sorted(silent.items()):
            if node in ended:
                console.warn(f"node {node} has ended, and its files are lost")
            else:
                lines.append(f"node {node} did not answer, so its files are unknown{why}")
        report_lost(console, found.values)
        folders = folders_of(found.values, to)
        results = JobResults(session, runner, cluster, job_id, to, folders, found.values)
        results.pull({node: _own_names(job, found.values[node]) for node in folders})
        for node in folders:
            if pulled := results.outcome.values.get(node):
                for line in pulled.notes:
                    console.warn(f"node {node}: {line}")
                what = f"{counted(pulled.files, 'file')}, {size_of(pulled.size)}"
                console.log(f"node {node}: pulled {what}, to {from_here(folders[node])}")
            else:
                why = str(results.outcome.errors.get(node, "its pull was stopped"))
                lines.append(f"node {node}: results were not pulled: {one_line(why, 500)}")
        after = new_files.find_all(runner, job, job_id=job_id, retry=True) if folders else found
        incomplete = results.merge(after.values)
        for line in incomplete:
            console.warn(line)
        unknown = sorted(after.errors.keys() & found.values.keys())
        lines += [f"node {node} did not answer, so its files are unknown" for node in unknown]
    except KeyboardInterrupt:
        return Left((*lines, "interrupted while results were pulled: some of them are missing"))
    collect_logs(console, runner, job_id, to)
    results.split_by_job()
    if first and not silent and not folders:
        where = (
            f"nothing to {', '.join(job.outputs)} (job.outputs)" if job.outputs else "no files in the project"
        )
        console.log(f"no results: the job wrote {where}")
    held = new_files.by_node(after.values)
    return Left((*lines, *(line_of(*one) for one in held.items())), pull_command(held), incomplete)


@dataclass
class JobResults:
    """The results of a job on these nodes, each of which has a folder, `to` or one below it. `replies`: what
    was not pulled before. `splits`: files of another job go to the folder of that one. `outcome`: of the
    pull."""

    session: Session[Reporter]
    runner: Runner
    cluster: Cluster
    job: str
    to: Path
    folders: Mapping[int, Path]
    replies: Mapping[int, NewFilesReply]
    splits: bool = True
    outcome: Outcome[Pulled] = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.known = checkpoints.on(self.folders, self.replies)
        self._after = self.known
        records = ClusterFolder(self.cluster.id), self.session.root
        self._jobs = launch_record.jobs_of(*records) if self.splits else []

    def pull(self, wanted: Mapping[int, Sequence[str]], *, everything: bool = False) -> None:
        """Pull what is `wanted` of each node, and tell the nodes. `everything`: not only what jobs wrote."""
        runner, settings = self.runner, self.session.settings

        def pull_one(node: int, progress: Progress) -> Pulled:
            request = PackRequest(
                PROJECT,
                tuple(wanted[node]),
                all=everything,
                selection=None if everything else new_files.selection_of(runner, settings.job, self.job),
                results_of=self.job if self.splits else "",
            )
            pulled = pull(
                runner,
                request,
                node=node,
                to=self.folders[node],
                places={job: self._folder_of(job, node) for job in self._jobs},
                known=self.known,
                progress=progress,
            )
            if (pulled.found or pulled.left) and node in self.replies:
                new_files.mark_pulled(runner, node, wanted[node], self.replies[node].time_ns, pulled)
            return pulled

        self.outcome = pull_from(self.session.console, runner, self.folders, pull_one)

    def merge(self, after: Mapping[int, NewFilesReply]) -> tuple[str, ...]:
        """Merge checkpoints as `merge_checkpoints`. `after`: what the nodes have after the pull."""
        self._after, console = checkpoints.on(self.folders, after), self.session.console
        return merge_checkpoints(console, self.to, self.folders, self.known, self._after, self.outcome.values)

    def split_by_job(self) -> None:
        """Complete the folders of the other jobs whose files came with these, and make those of earlier jobs
        that have left nothing on the nodes, with their logs. Never fails."""
        console, runner = self.session.console, self.runner
        chosen = [job for job in self._jobs if job < self.job and not (self.to.parent / job).exists()]
        if chosen:
            found = new_files.find_all(runner, self.session.settings.job).values
            is_known = len(found) == len(self.cluster.nodes) and all(
                reply.complete for reply in found.values()
            )
            held = {one.job for reply in found.values() for one in reply.jobs}
            chosen = [job for job in chosen if is_known and job not in held]
        for job in self._jobs:
            base = self.to.parent / job
            if files := sum(one.others.get(job, 0) for one in self.outcome.values.values()):
                console.log(f"of these, {counted(files, 'file')} of job {job}: {from_here(base)}")
                folders = {node: self._folder_of(job, node) for node in self.outcome.values}
                own = {node: replace(one, incomplete=()) for node, one in self.outcome.values.items()}
                merge_checkpoints(console, base, folders, self.known.written_by(job), self._after, own)
            elif job not in chosen:
                continue
            with contextlib.suppress(OSError):
                base.mkdir(parents=True)
            collect_logs(console, runner, job, base)

    def _folder_of(self, job: str, node: int) -> Path:
        return self.to.parent / job / self.folders[node].relative_to(self.to)


def pull_from(
    console: Reporter, runner: Runner, nodes: Iterable[int], work: Callable[[int, Progress], Pulled]
) -> Outcome[Pulled]:
    """Pull from these nodes at the same time; every node has its result or its error. Where a connection
    breaks, connect once more and continue."""
    chosen = set(nodes)

    def one(node: int) -> Pulled:
        with shown.of(node) as progress:
            return client.repeated(runner, lambda node: work(node, progress))(node)

    with ByteProgress(console) as shown:
        if len(chosen) == 1:  # in this thread, so that Ctrl-C ends it where it is
            (node,) = chosen
            try:
                return Outcome({node: one(node)})
            except (CloudDDPError, OSError) as error:
                return Outcome(errors={node: error})
        return runner.each(one, nodes=chosen, fatal=lambda _: False)


def merge_checkpoints(
    console: Reporter,
    base: Path,
    folders: Mapping[int, Path],
    known: Checkpoints,
    after: Checkpoints,
    pulled: Mapping[int, Pulled],
) -> tuple[str, ...]:
    """Merge each complete checkpoint whose files are on several nodes into one folder below `base`, and
    record what is known of all. Return why the others that were pulled are incomplete, one line each.
    Never fails."""
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
        + " and ".join(str(from_here(one / INCOMPLETE)) for one in places[:SHOWN])
        for folder, places in incomplete.items()
        if folder in known.incomplete()
    )


def raise_incomplete(incomplete: Sequence[str], *, all_nodes: bool) -> None:
    """Raise CloudDDPError where checkpoints that were pulled are incomplete, of all nodes or of some."""
    if incomplete:
        others = Message(
            "`cloudddp pull --all-nodes` completes a checkpoint if the other nodes have the rest"
        )
        raise CloudDDPError("\n".join(incomplete), hint="" if all_nodes else others)


def raise_left_out(pulled: Mapping[int, Pulled], place: str = "") -> None:
    """Raise CloudDDPError where results were not copied. What and why was reported. `place`: of the results
    in S3."""
    found = [node for node, one in sorted(pulled.items()) if one.left is None or one.left]
    if found:
        names = [one.name for node in found for one in pulled[node].left or ()]
        listed = some([one_line(name, 200) for name in names], SHOWN) or "too many files to name"
        raise CloudDDPError(
            f"{node_list(found)}: not all results were copied: {listed}",
            hint=f"the warnings above say why; these files stay in {place}"
            if place
            else Message(
                "the warnings above say why; the nodes keep these files until they terminate; `cloudddp ssh "
                f"{q(found[0])}` looks at them"
            ),
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
        for line in pulled.notes:
            console.warn(f"node {node}: {line}")
    files = sum(one.files for one in outcome.values.values())
    if files:
        size = size_of(sum(one.size for one in outcome.values.values()))
        console.log(f"logs: {counted(files, 'file')}, {size}, to {from_here(to / LOGS)}")
    write_report(console, job_id, to)


def folders_of(replies: Mapping[int, NewFilesReply], to: Path) -> dict[int, Path]:
    """Return where the results of each node that has some go: `to` for those of rank 0's, unless one of them
    has the name of another node's folder."""
    folders = {node: to / f"node{node}" for node, reply in replies.items() if reply.outputs}
    zero = min((node for node in folders if replies[node].rank_zero), default=None)
    if zero is not None:
        own = {to / name.partition("/")[0] for name in names_of(replies[zero].outputs)}
        if own.isdisjoint(folders.values()):
            folders[zero] = to
    return folders


def _own_names(job: JobSpec, reply: NewFilesReply) -> Sequence[str]:
    """Return the outputs that a node has. They are named as in our own settings: a node chooses the names in
    its answer."""
    there = names_of(reply.outputs)
    return [name for name in job.outputs if os.path.normpath(name) in there] or names_to_pull(job)


def names_to_pull(job: JobSpec) -> Sequence[str]:
    """Return what is pulled where nothing is named."""
    return job.outputs or (PROJECT_ROOT,)


def only_elsewhere(runner: Runner, name: str) -> str:
    """Return what to do about a file that a rank did not find and that jobs wrote on some nodes only; '' for
    any other one. `name` may be an absolute path on a node. Never fails."""
    path = posixpath.normpath(name.rpartition(f"/{PROJECT}/")[2])
    found = new_files.find_all(runner, JobSpec(outputs=(path,)))
    having = [node for node, one in found.values.items() if one.outputs]
    if path == "." or found.errors or len(having) in (0, len(found.values)):
        return ""
    have = f"{node_list(having)} {'has' if len(having) == 1 else 'have'}"
    folder = json.dumps(path.partition("/")[0] if "/" in path else "shared", ensure_ascii=False)
    return (
        f"only {have} {one_line(path, 200)}; nodes share no disk: add to cloudddp.toml the lines [[shared]] "
        f"and path = {folder}, once that folder was pulled and removed from the nodes"
    )


def report_new(console: Reporter, runner: Runner, settings: Config, finished: JobResult) -> None:
    """Report at the end of a launch which results `pull` copies and which new files it does not, and which
    were lost with nodes. Never fails."""
    runner.leave_out([node for node in finished.lost if node in runner.nodes])
    found = new_files.find_all(runner, settings.job, job_id=finished.job).values
    report_lost(console, found)
    if not finished.lost:
        report_held(console, found, settings)
    if found and not new_files.by_node(found):
        console.log("no new file is in the project; files that a script writes elsewhere are not pulled")


def report_lost(console: Reporter, replies: Mapping[int, NewFilesReply]) -> None:
    """Report which files only nodes without a reply have, as far as the other nodes know of them."""
    for node, names in new_files.lost_files(replies).items():
        console.warn(
            f"only node {node} has {one_line(listed(names), 300)}: while ranks run, what they save is not "
            "copied to other nodes. A [[shared]] folder is on all of them"
        )


def report_held(console: Reporter, replies: Mapping[int, NewFilesReply], settings: Config) -> None:
    """Report the files on the nodes that were not pulled, and the command that pulls them."""
    held = new_files.by_node(replies)
    if found := {node: one for node, one in held.items() if one.outputs}:
        listed = ", ".join(f"node {node}: {new_files.describe(one.outputs)}" for node, one in found.items())
        elsewhere = any(not one.rank_zero for one in found.values())
        pull = "`cloudddp pull --all-nodes`" if elsewhere else "`cloudddp pull`"
        console.suggest(f"results: {inert(listed)}; next: {pull}")
    for node, one in held.items():
        if one.left:
            console.warn(f"left out by a pull: {line_of(node, one)}")
    if not (others := {node: one for node, one in held.items() if one.others}):
        return
    listed = "; ".join(f"node {node}: {new_files.describe(one.others)}" for node, one in others.items())
    copies, outputs = pull_command(others), settings.job.outputs
    if not outputs:
        most = f"job.pull_mb = {settings.job.pull_mb:g} MiB of a node"
        console.warn(f"`pull` copies at most {most}, and leaves out {listed}")
        console.suggest(f"  {copies} copies these; what nobody needs belongs in [job] scratch")
        return
    console.warn(f"`pull` does not copy files outside job.outputs = {toml(outputs)}: {listed}")
    names = inert(toml([*outputs, *names_of(new for one in others.values() for new in one.others)]))
    console.suggest(f"  {copies} copies them; or set outputs = {names} in [job] of cloudddp.toml")


def line_of(node: int, held: NewFilesReply) -> str:
    """Return what one node holds: new files, and why some were left out."""
    what = new_files.describe((*held.outputs, *held.others)) or "files"
    why = "".join(f"; {one_line(one.name, 200)}: {one_line(one.reason, 200)}" for one in held.left[:SHOWN])
    rest = "" if held.complete else "; there are too many files to check them all"
    return f"node {node}: {what}{why}{rest}"


def pull_command(held: Mapping[int, NewFilesReply], *, with_outputs: bool = False) -> str:
    """Return the command that pulls these files: from the node of rank 0, which is the default, or from all
    nodes.

    `with_outputs`: with those inside the outputs, which a pull without names would copy. The names are chosen
    by the node, and the user will type them: `--` keeps them from being options, and a name that a terminal
    would not show unchanged is left out.
    """
    found = [[*one.outputs, *one.others] if with_outputs else one.others for one in held.values()]
    names = dict.fromkeys(name for one in found for name in names_of(one) if _can_be_typed(name))
    end = ["--"] if any(name.startswith("-") for name in names) else []
    words = [*(["--all-nodes"] if any(not one.rank_zero for one in held.values()) else []), *end, *names]
    return f"`{q('cloudddp', 'pull', *words)}`"


def _can_be_typed(name: str) -> bool:
    try:
        parts = safe_names.requested([name])
    except UsageError:
        return False
    return one_line(name) == name and not any(safe_names.guarded(part) for path in parts for part in path)
