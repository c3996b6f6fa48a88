"""Starting a job on a cluster, recording what it was launched with, and following it to its end."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.aws import file_systems
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import NODE_0, Config
from cloudddp.errors import CloudDDPError, Interrupted, Message, NotConfirmed, StepUpdate, UsageError, q
from cloudddp.files import project_id
from cloudddp.formats import plural
from cloudddp.job import cancel, launch, launch_record, project_files, project_scan, sync
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.project_files import ProjectFiles
from cloudddp.job.py_spy import PySpyTransfer
from cloudddp.job.report import launched
from cloudddp.job.results import restore
from cloudddp.job.results.restore import results_here
from cloudddp.job.sync import ProjectIdentity
from cloudddp.local_state import LAUNCH, ClusterFolder
from cloudddp.operations import deadlines
from cloudddp.operations.reporter import Reporter, ReporterT
from cloudddp.operations.results import collect, ended_reports
from cloudddp.operations.session import Session
from cloudddp.text import node_list, one_line, without_colours


def checked_script(session: Session[Reporter], script: Script, *, fresh: bool = False) -> Script:
    """Return the script by its path in the project. Raises UsageError before anything is called."""
    console, root, here = session.console, session.root, Path.cwd()
    secret_files = map(Path, session.env_files)
    found = launch.prepare(
        root, here, script, session.settings, fresh=fresh, secret_files=secret_files, warn=console.warn
    )
    if here != root and here.is_relative_to(root):
        console.log(f"the project is {root}: ranks start there, not in {here.relative_to(root)}/")
    for name in project_scan.saved_outside(root, found.target):
        console.warn(f"{found.target} saves to {one_line(name, 100)}, outside the project: that is lost")
    if fresh:
        check_nodes_min(session.settings, session.settings.cluster.nodes)
    return found


def report_results_here(session: Session[Reporter], how: str, cluster: Cluster | None = None) -> None:
    """Report that results of earlier jobs are on this computer, at the first launch on new nodes (None: that
    are not created yet): a script that continues from them would begin again. `how`: what sends them."""
    folder = None if cluster is None else ClusterFolder(cluster.id)
    is_new = folder is None or (not folder.jobs() and folder.read(folder.restored) is None)
    if is_new and (found := results_here(session.root)):
        session.console.suggest(
            "results of earlier jobs are on this computer and not on the nodes (the newest: "
            f"{found[-1]}); if the script continues from them: {how}"
        )


def results_of(session: Session[Reporter], wanted: bool | str) -> list[Path]:
    """Return the folders with the results of the job of that id (True: the newest) and of those that it
    continued, the oldest first; [] for False. Raises UsageError where they cannot be sent."""
    if wanted is False:
        return []
    folders, later = restore.chain(session.root, None if wanted is True else wanted)
    if later:
        session.console.warn(
            f"not sent, since they are not on this computer: results of {', '.join(later)}, which continued "
            f"job {folders[-1].name}"
        )
    for why in restore.check_complete(folders):
        session.console.warn(f"not sent: {one_line(why, 1000)}")
    return folders


def send_files(
    session: Session[Reporter],
    runner: Runner,
    cluster: Cluster,
    results: Sequence[Path],
    *,
    files: ProjectFiles | None = None,
) -> None:
    files = files or project_files.of_config(session.root, session.settings)
    with session.console.progress() as progress:
        sync.sync(
            runner, cluster, session.settings, files=files, progress=progress, origin=origin_of(session)
        )
        if not results:
            return
        count = restore.restore(runner, cluster, results, project=files.manifest, progress=progress)
        names = [result.name for result in results]
        launch_record.note_put_back(ClusterFolder(cluster.id), session.root, names)
        more = f" and {plural(len(results) - 1, 'job')} before it" if results[1:] else ""
        progress(
            f"{plural(count, 'result')} of {results[-1]}{more} on the nodes, where a sync leaves them alone"
        )


def start_job(
    session: Session[Reporter], runner: Runner, cluster: Cluster, job: NewJob, *, nodes_stay: bool = True
) -> PySpyTransfer:
    """Start the job, and record what it was launched with; return what is still being sent. After an
    interrupt the caller calls `cancel.abort_launch`. If it is not started, report when nodes that stay
    end."""
    session = _without_torch(session)
    deadlines.warn_if_near(session.console, cluster)
    check_nodes_min(session.settings, len(cluster.nodes) + cluster.missing)
    systems = sorted({one.source for one in session.settings.shared} - {NODE_0})
    node, warn = next(iter(cluster.nodes.values())), session.console.warn
    sources = {name: file_systems.find(session.account.aws(), name, node, warn) for name in systems}
    with _reported(session, cluster, job, nodes_stay=nodes_stay):
        secret_files = [Path(one) for one in session.env_files]
        files = project_files.of_config(session.root, session.settings, secret_files=secret_files)
        facts = launched.facts(cluster, session.settings, files, [*secret_files, *session.files])
        folder = ClusterFolder(cluster.id)
        record = launch_record.of_launch(
            job,
            session.settings,
            root=session.root,
            files=session.files,
            variables=session.variables,
            env_files=session.env_files,
            nodes=tuple(node.id for node in cluster.nodes.values()),
            facts=facts,
            continues=launch_record.continued_on(folder, session.root),
        )
        launch_record.keep(folder, record)
        try:
            return _launch(session, runner, cluster, job, files, sources)
        except signals.HungUp:
            raise  # what has started continues
        except (Exception, KeyboardInterrupt):
            folder.remove(folder.job(job.id))  # it was refused, or is ended: there is nothing to resume
            raise


@contextlib.contextmanager
def _reported(
    session: Session[Reporter], cluster: Cluster, job: NewJob, *, nodes_stay: bool
) -> Iterator[None]:
    """Report when nodes that stay end, if the job is not started."""
    try:
        yield
    except signals.HungUp:
        raise
    except (Exception, KeyboardInterrupt):
        if nodes_stay:
            deadlines.report_not_started(session.console, cluster, job)
        raise


def _launch(
    session: Session[Reporter],
    runner: Runner,
    cluster: Cluster,
    job: NewJob,
    files: ProjectFiles,
    sources: Mapping[str, str],
) -> PySpyTransfer:
    """Launch the job, with its progress in the cluster's journal."""
    folder = ClusterFolder(cluster.id)

    def setup_line(node: int, line: str) -> None:
        session.console.log(f"[setup | node {node}] {without_colours(line)}")

    with session.console.progress() as progress:

        def note(text: str) -> None:
            progress(text)
            if not isinstance(text, StepUpdate):
                with contextlib.suppress(OSError, UsageError):
                    folder.journal(LAUNCH, job=job.id, text=str(text))

        return launch.launch(
            runner,
            cluster,
            session.settings,
            job,
            files,
            progress=note,
            origin=origin_of(session),
            on_setup_line=setup_line,
            sources=sources,
        )


class JobStopped(Interrupted):
    """A job was stopped because of an interrupt. `cancel_again`: it may still run on some node."""

    def __init__(self, job_id: str, outcome: str, *, cancel_again: bool = False) -> None:
        again = f"`cloudddp cancel {q(job_id)}`, and again if necessary"
        hint = Message(again if cancel_again else "`cloudddp down` stops the bill")
        super().__init__(f"{outcome}; the cluster is still up", hint=hint)
        self.outcome = outcome


class Detached(Exception):
    """The user has left a job that keeps running."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} keeps running")
        self.job_id = job_id


@dataclass(frozen=True)
class Display:
    """Where a job is shown to whoever called: here, each line of the ranks' logs by a callback."""

    session: Session[Reporter]
    on_line: Callable[[str], None] | None = None

    def follow(
        self,
        runner: Runner,
        cluster: Cluster,
        job_id: str,
        nodes: Collection[int],
        *,
        mine: bool = False,
        timeout: float | None = None,
    ) -> JobResult:
        """Show a job's logs until it ends, and return how. `mine`: the caller has started it, so that Ctrl-C
        may end it. May raise JobStopped, Detached, and TimeoutError after `timeout` seconds."""
        del mine  # nobody can be asked

        def show(node: int, rank: int, line: str) -> None:
            if self.on_line is not None and rank >= 0:
                self.on_line(f"[rank {rank} | node {node}] {line}")

        ended = partial(ended_reports, self.session.account, cluster)
        follower = JobFollower(runner, job_id, nodes, on_line=show, ended_instances=ended)
        with contextlib.closing(follower):
            return follower.run(timeout)

    def report(self, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
        """Report how it has ended; pull its results if its nodes are about to end."""
        if finished.leaving is None:
            return
        console = self.session.console
        left = collect(self.session, runner, cluster, finished.job, finished)
        for line in left.lines:
            console.warn(f"not pulled: {line}")
        if left.lines:
            console.suggest(f"before the nodes end: {left.pull}")


def start_and_follow(
    session: Session[Reporter],
    runner: Runner,
    cluster: Cluster,
    job: NewJob,
    display: Display | None,
    *,
    nodes_stay: bool = True,
    on_start: Callable[[], None] = lambda: None,
) -> JobResult | None:
    """Start the job, follow it to its end and report that; without a `display` only send all that it needs,
    and return None. `nodes_stay`: as for `start_job`. `on_start` is called when it has been started. Raises
    JobStopped at a Ctrl-C."""
    try:
        sending = start_job(session, runner, cluster, job, nodes_stay=nodes_stay)
        try:
            on_start()
            if display is None:
                sending.wait()
                return None
            finished = display.follow(runner, cluster, job.id, cluster.nodes, mine=True)
        finally:
            sending.abandon()
    except Detached:
        if nodes_stay:
            deadlines.report_unfollowed(session.console, cluster, session.settings, job)
        raise
    except signals.HungUp:
        raise
    except KeyboardInterrupt:
        with signals.protected(lambda: session.console.log("still ending the job; this takes a moment")):
            unsure = cancel.abort_launch(runner, job.id)
        known = f"it may still run on {node_list(unsure)}" if unsure else "it was ended"
        outcome = f"interrupted while job {job.id} was being started; {known}"
        raise JobStopped(job.id, outcome, cancel_again=bool(unsure)) from None
    display.report(runner, cluster, finished)
    return finished


def _without_torch(session: Session[ReporterT]) -> Session[ReporterT]:
    """Return the settings for a rehearsal where torch, and so torchrun, is not installed: a script without
    torch needs none. Nodes of the simulator use the packages of this computer."""
    job, setup = session.settings.job, session.settings.setup
    own = job.python or job.rendezvous != "c10d" or setup.environment or setup.run
    if not session.options.sim or own or importlib.util.find_spec("torch") is not None:
        return session
    session.console.log("torch is not installed here: ranks start without torchrun (--rendezvous direct)")
    settings = replace(session.settings, job=replace(job, rendezvous="direct"))
    return replace(session, settings=settings)


def check_nodes_min(config: Config, nodes: int) -> None:
    least = config.job.nodes_min
    if least is not None and least > nodes:
        raise UsageError(
            f"job.nodes_min is {least}, and the cluster has {plural(nodes, 'node')}",
            hint=f"give at most {nodes}: --nodes-min {nodes}",
        )


def origin_of(session: Session[Reporter]) -> ProjectIdentity:
    """Return the project's id, and how to ask whether other files may be replaced: unasked they may not."""

    def agree(nodes: Sequence[int]) -> None:
        held = (
            f"{node_list(nodes)} of cluster {session.settings.cluster.name!r} "
            f"{'has' if len(nodes) == 1 else 'have'} the files of another project, or of this one from "
            "another computer or folder"
        )
        answer = session.console.agree(f"{held}. Replace them?")
        if answer is None:
            raise CloudDDPError(
                f"{held}; nothing was changed",
                hint="`cloudddp sync --yes` replaces them; -c NAME chooses a cluster for this project",
            )
        if not answer:
            raise NotConfirmed

    return ProjectIdentity(project_id(session.root), agree)
