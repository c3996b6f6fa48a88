"""How a job goes on: the loop that looks at a job and its nodes and does what `next_attempt` decides, for
`resume`, `watch`, `launch --retries` and `run`, and for the Python API."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import refusal
from cloudddp.cluster import connect, lookup
from cloudddp.cluster import replace_nodes as replacing
from cloudddp.cluster.launch_errors import NotLaunched
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.wait_ready import ready_minutes
from cloudddp.config import timing
from cloudddp.config.command_line import Flag
from cloudddp.config.spec import Config
from cloudddp.config.values import seconds_of
from cloudddp.errors import AWSError, CloudDDPError, NodeError, UsageError, q
from cloudddp.formats import plural
from cloudddp.job import launch, launch_record, poweroff, status
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import LaunchRecord
from cloudddp.job.next_attempt import Do, NextMove, Policy, Reason, Seen, next_attempt
from cloudddp.job.results import checkpoints, new_files
from cloudddp.job.status import JobRecord
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import deadlines
from cloudddp.operations.node_connections import cause_named
from cloudddp.operations.reporter import Reporter, ReporterT
from cloudddp.operations.results_on_nodes import report_lost
from cloudddp.operations.session import Session
from cloudddp.operations.start_job import Display, check_nodes_min, start_and_follow
from cloudddp.text import node_list, one_line

_AGAIN = 1.0  # seconds between two looks
_LIST_SECONDS = 30.0  # for a node to list its jobs: it may have been lost meanwhile
_NOTICE_MINUTES = 15  # after the end of a job in which the node that was announced to end is replaced
_LAUNCH_MINUTES = 60  # in which a job is sent and set up


def of_job(
    session: Session[ReporterT],
    flags: Sequence[Flag],
    job_id: str | None,
    display: Callable[[Session[ReporterT]], Display],
    times: int,
    *,
    waits: bool = True,
    replaced: Collection[int] = (),
    detach: bool = True,
    more: Sequence[str] = (),
) -> Continuation:
    """Return how a job (by default the newest) goes on, with the settings that it was launched with; `flags`
    of this command override them. The rest as in `Policy` and `Continuation`. Raises CloudDDPError;
    UsageError for what the job needs and is gone: a variable, the script, the project."""
    cluster = session.account.cluster()
    record = launch_record.find(ClusterFolder(cluster.id), job_id)
    job = launch_record.job_again(record, session.variables, session.env_files, os.environ)
    now, given = session.settings, {flag.key for flag in flags}
    least = now.job.nodes_min if "nodes_min" in given else record.config.job.nodes_min
    wait = now.cluster.wait_capacity if "wait_capacity" in given else record.config.cluster.wait_capacity
    settings = replace(
        record.config,
        job=replace(job, nodes_min=least),
        cluster=replace(
            record.config.cluster, name=cluster.name, wait_capacity=wait, ssh_port=now.cluster.ssh_port
        ),
    )
    root = Path(record.root)
    if not root.is_dir():
        raise UsageError(
            f"the project of job {record.job} is gone: {root} is not a folder", hint="restore it"
        )
    launch.prepare(root, root, record.script, settings)
    explicit = {variable.partition("=")[0] for variable in session.variables}
    own = replace(
        session,
        settings=settings,
        root=root,
        files=tuple(map(Path, record.files)),
        variables=(*(name for name in record.passed if name not in explicit), *session.variables),
        env_files=session.env_files or record.env_files,
    )
    check_nodes_min(settings, len(cluster.nodes) + cluster.missing)
    cluster.require_replaceable(replaced)
    policy = Policy.of(settings.job, times, waits=waits, replaced=replaced)
    return Continuation(own, cluster, record, policy, display(own), detach, tuple(more))


def continue_job(
    session: Session[Reporter], cluster: Cluster, job_id: str, finished: JobResult | None, display: Display
) -> Continuation:
    """Start a job again that was followed and has failed, as often as job.retries allows."""
    job = session.settings.job
    record = launch_record.find(ClusterFolder(cluster.id), job_id)
    policy = Policy.of(job, job.retries, waits=True)
    return Continuation(session, cluster, record, policy, display, result=finished).run()


@dataclass(slots=True)
class Continuation:
    """A job that goes on. `display` shows the jobs, those that are started here only without `detach`.
    `more`: further arguments of the script. `result`: how the job has ended, where it was followed."""

    session: Session[Reporter]
    cluster: Cluster
    record: LaunchRecord
    policy: Policy
    display: Display
    detach: bool = False
    more: tuple[str, ...] = ()
    result: JobResult | None = None
    job: NewJob | None = field(default=None, init=False)  # the last one that was started
    gave_up: NextMove | None = field(default=None, init=False)
    _tried: frozenset[str] = field(default=frozenset(), init=False)  # instances of an attempt that has failed
    _broken: NodeError | None = field(default=None, init=False)  # why it has failed
    _since: float = field(default_factory=time.monotonic, init=False)  # when the first look began
    _reported: str = field(default="", init=False)
    _held: bool = field(default=False, init=False)  # the nodes were told to wait

    def checked(self) -> Continuation:
        """Raise CloudDDPError if the job was given up."""
        if self.gave_up is not None:
            error = self._broken if self.gave_up.reason is Reason.BROKEN else None
            raise error or CloudDDPError(self.gave_up.text, hint=self.gave_up.hint)
        return self

    @property
    def ended(self) -> JobResult:
        """How the job has ended that was followed last. Raises CloudDDPError if it was given up."""
        if (result := self.checked().result) is None:
            raise LookupError("no job was followed")
        return result

    def run(self) -> Continuation:
        """Go on until the job has ended for good (`result`), or cannot be started again (`gave_up`). Raises
        CloudDDPError, and what `display` raises."""
        while True:
            move = self._next(None)
            with ExitStack() as lock, ExitStack() as connections:
                try:
                    if move.do is Do.LOOK:
                        seen, runner = self._look(lock, connections)
                        move = self._next(seen)
                    if move.do is Do.FOLLOW and runner is not None:
                        lock.close()
                        self._follow(move.job, seen.job, runner)
                except (NodeError, AWSError) as error:
                    lock.close()
                    if self._recover(error):
                        continue
                    return self
                if move.do is Do.WAIT and runner is not None and not self._held:
                    self._held = True  # grace may be shorter than the pause until the next look
                    poweroff.hold(runner, self.cluster, seen.job, self.policy.silence)
                if move.do is Do.START and runner is not None:
                    move = self._resume_job(move, seen, runner, lock, connections)
            match move.do:
                case Do.FINISH:
                    return self
                case Do.GIVE_UP:
                    self.gave_up = move
                    return self
                case Do.WAIT | Do.WAIT_FOR_COMMAND:
                    self._report(move.text)
                    time.sleep(_AGAIN)
            if move.do is Do.WAIT_FOR_COMMAND:
                self._since = time.monotonic()

    def _next(self, seen: Seen | None) -> NextMove:
        return next_attempt(self.record.job, self.result, seen, self.policy)

    def _report(self, text: str) -> None:
        """Report what is done, unless that was reported last."""
        if text and text != self._reported:
            self.session.console.log(text)
        self._reported = text or self._reported

    def _recover(self, error: NodeError | AWSError) -> bool:
        """Wait, since a node may be lost at any moment. If the error is permanent, raise it, or return False
        where it is known how the job has ended."""
        permanent = isinstance(error, AWSError) and not error.transient
        late = time.monotonic() - self._since > timing.current().offline
        stop = permanent or late or not self.policy.waits
        if stop and (self.result is None or not self.policy.waits):
            raise error
        self.session.console.warn(error.message)
        if not stop:
            time.sleep(timing.current().reconnect)
        return not stop

    def _follow(self, job_id: str, job: JobRecord | None, runner: Runner) -> None:
        """Follow the job to its end; or another one, after a look at all its nodes."""
        finished = None
        if job is not None and job.id == job_id and self.result is None:
            try:
                finished = self.display.follow(runner, self.cluster, job_id, job.nodes, mine=False)
            finally:
                self._since = time.monotonic()
            self.display.report(runner, self.cluster, finished)
        self._switch(job_id, finished)

    def _switch(self, job_id: str, result: JobResult | None) -> None:
        if job_id != self.record.job:
            self.record = launch_record.find(ClusterFolder(self.cluster.id), job_id)
        self.result, self._broken, self._tried, self._held = result, None, frozenset(), False
        self._since = time.monotonic()

    # -- looking -------------------------------------------------------------------------------------------

    def _look(self, lock: ExitStack, connections: ExitStack) -> tuple[Seen, Runner | None]:
        """Return what AWS and the nodes show, and the connections to them. `lock` gets the lock before the
        jobs are read, so that no other command continues one of them meanwhile."""
        session, folder = self.session, ClusterFolder(self.cluster.id)
        none = Seen(self.cluster.name, waited=time.monotonic() - self._since)
        with folder.resuming() as free:
            if not free:
                return replace(none, busy=True), None
        aws, found = session.account.aws(), self.cluster
        if not 0 <= time.time() - found.seen < _AGAIN:
            found = lookup.refresh(aws, found.name, found.id) or replace(found, nodes={})
        if not found.nodes:
            return none, None
        self.cluster = found
        result, is_clear = self.result, self.policy.waits and self._broken is None
        if result is None or result.doubtful or result.rebooted or result.leaving is not None:
            is_clear = False
        # The job has ended for a reason of its own, and all its nodes run: none needs to answer for that.
        if is_clear and set(self.record.nodes) <= {node.id for node in found.nodes.values()}:
            return replace(none, nodes=frozenset(found.nodes)), None
        stay = found.only([node.id for rank, node in found.nodes.items() if rank not in self.policy.replaced])
        known = stay.only(self.record.nodes)
        to_follow = self.policy.waits and self.result is None
        if not self.policy.waits:
            for rank in stay.nodes:
                stay.require_running(rank)
        runner, errors = connect.connect_reachable(
            # A replacement that an earlier command has left may not be ready.
            stay if to_follow or not known.nodes else known,
            session.settings.cluster,
            progress=session.console.log,
        )
        connections.enter_context(closing(runner))
        for error in errors.values() if to_follow else ():
            session.console.warn(str(error))
        if not lock.enter_context(folder.resuming()):
            return replace(none, busy=True), None
        broken: dict[int, NodeError] = {}
        limit = max(session.settings.job.heartbeat, _LIST_SECONDS)
        jobs = status.list_jobs(runner, silent=broken, seconds=limit)
        asked = known.nodes or stay.nodes
        silent = {node: str(why) for node, why in (errors | broken).items() if node in asked}
        if none.waited >= self.policy.silence:
            for node, text in lookup.status_problems(aws, found, silent).items():
                silent[node] += f"; node {node}: {text}"
        # A command that was killed may have recorded a job that it has not started: its nodes do not know it.
        started = {job.id for job in jobs}
        while not silent and stay.only(self.record.nodes).nodes and self.record.job not in started:
            if not (before := self.record.resumed_from):
                break
            session.console.log(f"job {self.record.job} was never started: going on with {before}")
            self.record = launch_record.find(folder, before)
        return self._seen(none, stay, jobs, silent), runner

    def _seen(self, none: Seen, stay: Cluster, jobs: Sequence[JobRecord], silent: Mapping[int, str]) -> Seen:
        cluster, record, known = self.cluster, self.record, stay.only(self.record.nodes)
        job = next((one for one in jobs if one.id == record.job), None)
        # A start that has failed, or its setup, continues nothing.
        ran = [one for one in jobs if not one.status.ended or (one.started is not None and not one.setup)]
        leaving = job.leaving if job is not None else None
        ended = job.ended if job is not None and job.ended is not None else time.time()
        announced = leaving is not None and deadlines.announced_by_aws(cluster, self.session.settings, ended)
        recent = announced and time.time() - ended < _NOTICE_MINUTES * timing.current().minute
        return replace(
            none,
            job=job,
            later=next((one for one in reversed(ran) if one.resumed_from == record.job), None),
            nodes=frozenset(cluster.nodes),
            known=bool(known.nodes),
            gone=bool((self._tried or set(record.nodes)) - {node.id for node in cluster.nodes.values()}),
            silent=silent,
            announced=announced,
            ending=frozenset(rank for rank in known.nodes if rank == leaving and recent),
            broken=self._broken is not None,
        )

    # -- starting ------------------------------------------------------------------------------------------

    def _resume_job(
        self, move: NextMove, seen: Seen, known: Runner, lock: ExitStack, connections: ExitStack
    ) -> NextMove:
        """Replace what is lost, and start the job again; follow it unless it is to be detached. Return what
        was done. Both stacks are closed when the job has been started."""
        console, cluster, record = self.session.console, self.cluster, self.record
        self._report(move.text)
        for node in move.replaced - self.policy.replaced:
            console.log(f"node {node} is about to end: it is replaced now")
        self.policy = replace(self.policy, times=self.policy.times - 1, replaced=frozenset())
        stay = [node.id for rank, node in cluster.nodes.items() if rank not in move.replaced]
        try:
            cluster.require_replaceable(move.replaced)
            self._prepare(known, move, seen.job)
            move = self._replace_nodes(move, seen)
            if move.do not in (Do.START, Do.START_ON_FEWER):
                return move
            cluster = self.cluster
            if not cluster.only(record.nodes).nodes:
                console.warn(
                    f"no node that job {record.job} ran on is left: the script begins where it finds a "
                    "snapshot elsewhere"
                )
            own = replace(self.session, settings=_for_nodes(self.session.settings, cluster))
            script = replace(record.script, args=(*record.script.args, *self.more))
            job = NewJob(script, record.poweroff, record.job, record.keep)
            console.log(f"resuming job {record.job} as {job.id} on {plural(len(cluster.nodes), 'node')}")

            def on_start() -> None:
                self.job = job
                lock.close()
                connections.close()

            with (
                cause_named(own.account, cluster),
                closing(connect.connect(cluster, own.settings.cluster, progress=console.log)) as runner,
            ):
                display = None if self.detach else self.display
                finished = start_and_follow(own, runner, cluster, job, display, on_start=on_start)
        except NodeError as error:
            if not self.policy.times:
                raise
            console.warn(error.message)
            self._broken, self._tried, self._since = error, frozenset(stay), time.monotonic()
        else:
            self._switch(job.id, finished)
        return move

    def _prepare(self, runner: Runner, move: NextMove, job: JobRecord | None) -> None:
        """Report which files the nodes that stay do not have, before others are bought, and let those nodes
        wait for the others. Raises CloudDDPError for an incomplete checkpoint: a script would load it, or
        begin without it."""
        cluster, settings, now = self.cluster, self.session.settings, timing.current()
        found = new_files.find_all(runner, settings.job).values
        replies = {node: reply for node, reply in found.items() if node not in move.replaced}
        report_lost(self.session.console, replies)
        known = checkpoints.on(replies, replies)
        if blocking := known.blocking(range(len(cluster.nodes) + cluster.missing)):
            raise CloudDDPError(
                f"{one_line(refusal(blocking[0], known.problems), 1000)}. No job was started",
                hint="`cloudddp pull --all-nodes` copies what there is of it. Then `cloudddp exec -- rm -rf "
                f"{q(blocking[0])}` removes it, and `cloudddp resume` begins with what is left",
            )
        minutes = ready_minutes(settings.cluster, cluster.gpus) + _LAUNCH_MINUTES
        boot = minutes * now.minute + now.gpus + now.torch
        poweroff.hold(runner, cluster, job, seconds_of(settings.cluster.wait_capacity) + boot)

    def _replace_nodes(self, move: NextMove, seen: Seen) -> NextMove:
        """Replace the lost nodes. Where there is no capacity for them, return whether the job goes on."""
        console, cluster, aws = self.session.console, self.cluster, self.session.account.aws()
        with console.progress() as progress:
            replacing.terminate(aws, cluster, sorted(move.replaced), progress)
            try:
                self.cluster = replacing.replace_lost(aws, cluster, self.session.settings.cluster, progress)
                return move
            except NotLaunched as failure:
                self.cluster = lookup.refresh(aws, cluster.name, cluster.id) or cluster
                lost = node_list(replacing.missing_ranks(self.cluster))
                shortage = f"{lost} could not be replaced: {failure.message}"
            except AWSError:
                found = lookup.refresh(aws, cluster.name, cluster.id)
                if found is None or not found.nodes:
                    raise CloudDDPError(
                        f"cluster {cluster.name!r} was removed while a node of it was being replaced",
                        hint="`cloudddp up` creates it again",
                    ) from None
                raise
        move = self._next(replace(seen, nodes=frozenset(self.cluster.nodes), shortage=shortage))
        if move.do is Do.START_ON_FEWER:
            console.warn(move.text)
        return move


def _for_nodes(config: Config, cluster: Cluster) -> Config:
    """Return the settings for the nodes that there are now: a list with a number per node may be too long."""
    counts = config.job.nproc_per_node
    if not isinstance(counts, tuple) or len(counts) <= len(cluster.nodes):
        return config
    kept = tuple(counts[node] for node in cluster.nodes if node < len(counts))
    return replace(config, job=replace(config.job, nproc_per_node=kept))
