"""Clusters and jobs as objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cloudddp import signals
from cloudddp.api.call import Call, flags_of, script_of
from cloudddp.aws import inventory
from cloudddp.cluster import model as clusters
from cloudddp.cluster.nodes_end import deadline
from cloudddp.cluster.teardown import STILL_REMOVING
from cloudddp.errors import CloudDDPError, Leftovers
from cloudddp.job import cancel as cancelling
from cloudddp.job import project_files, status
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import KEEP_MINUTES, NewJob
from cloudddp.operations import process_nodes
from cloudddp.operations.continuation import Continuation, of_job
from cloudddp.operations.node_connections import connected, reachable
from cloudddp.operations.results import collect, raise_incomplete
from cloudddp.operations.start_job import Display, checked_script, results_of, send_files, start_job
from cloudddp.operations.take_down import take_down_id
from cloudddp.operations.unsaved_work import unsaved_work

OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster: `rank` is its node rank, `id` that of the EC2 instance, `zone` its availability
    zone, `state` that of EC2. Addresses are '' where it has none."""

    rank: int
    id: str
    type: str
    zone: str
    state: str
    public_ip: str
    private_ip: str


class Job:
    """A job on a cluster. `id` is its job id."""

    def __init__(self, call: Call, job_id: str, jobs: list[Job]) -> None:
        self._call = call
        self.id = job_id
        self._jobs = jobs  # of the object of the cluster, which finishes them at its end

    def status(self) -> status.JobRecord:
        """Return its state, step and times, as `cloudddp jobs` shows them. Raises CloudDDPError."""
        with reachable(self._call.session(), required=()) as (_, runner):
            return status.find_job(runner, self.id)

    def wait(self, timeout: float | None = None, *, on_line: OnLine | None = None) -> JobResult:
        """Wait until the job has ended, and return how: `exit_code` is 0 only if all ranks have finished.

        `on_line` gets each line of the logs as `[rank 3 | node 1] text`, from the beginning. Raises
        TimeoutError after `timeout` seconds (the job goes on), CloudDDPError where no node answers.
        """
        session = self._call.session()
        with reachable(session, required=()) as (cluster, runner):
            nodes = status.find_job(runner, self.id).nodes
            return Display(session, on_line).follow(runner, cluster, self.id, nodes, timeout=timeout)

    def resume(
        self, *, replace: Collection[int] = (), env: Mapping[str, str] | None = None, **settings: Any
    ) -> Job:
        """Replace nodes that were lost, and those in `replace`, start the job again from its snapshot, and
        return the job that continues it when its ranks have started.

        `env`: values of variables that were given to `launch`, which are not recorded. `settings`: nodes_min
        and wait_capacity, as they were by default. Raises UsageError, CloudDDPError: the job runs, has
        succeeded or was resumed before, a node is silent, or there is no capacity.
        """
        again = _continuation(self._call, self.id, env, settings, None, 1, waits=False, replaced=replace)
        self._jobs.append(Job(self._call, again.run().checked().record.job, self._jobs))
        return self._jobs[-1]

    def cancel(self) -> None:
        """Stop every rank on every node; ranks get SIGTERM first. Raises CloudDDPError where one survives."""
        session = self._call.session()
        with connected(session) as (_, runner):
            cancelling.cancel(runner, self.id, grace=session.settings.job.stop_grace)

    def pull(self) -> Path:
        """Copy the job's results and logs from every node into results/JOB of the project, and return that
        folder. Files that already exist are skipped. Raises CloudDDPError if anything was left out."""
        session = self._call.session()
        with reachable(session, required=()) as (cluster, runner):
            left = collect(session, runner, cluster, self.id, None)
        if left.lines:
            hint = f"the nodes keep these files until they terminate; {left.pull}"
            what = f"not all results of job {self.id} were copied: {'; '.join(left.lines)}"
            raise CloudDDPError(what, hint=hint)
        raise_incomplete(left.incomplete, all_nodes=True)
        return session.root / project_files.RESULTS / self.id


def _continuation(
    call: Call,
    job_id: str | None,
    env: Mapping[str, str] | None,
    settings: Mapping[str, Any],
    on_line: OnLine | None,
    times: int,
    **more: Any,
) -> Continuation:
    flags = flags_of(settings, "cluster", "job")
    session = call.with_settings(flags).session(env)
    return of_job(session, flags, job_id, partial(Display, on_line=on_line), times, **more)


class Cluster:
    """A cluster of the caller. As a context manager it is removed at the end, unless it existed before: jobs
    of this object that still run are stopped, and their results are pulled first; nodes that hold results
    which could not be pulled stay until their deadline, and Leftovers is raised."""

    def __init__(self, call: Call, found: clusters.Cluster, *, created: bool) -> None:
        self._call = replace(call, region=found.region)
        self._found = found
        self._jobs: list[Job] = []
        self.name, self.id, self.region = found.name, found.id, found.region
        self.created = created  # by the call that has returned it

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The live nodes, by node rank, as they were at the last call, such as `launch` or `cost`."""
        return tuple(
            Node(rank, one.id, one.type, one.zone, one.state, one.public_ip or "", one.private_ip or "")
            for rank, one in sorted(self._found.nodes.items())
        )

    @property
    def deadline(self) -> datetime | None:
        """When the nodes terminate by themselves."""
        return deadline(self._found)

    @property
    def price(self) -> float | None:
        """USD per hour of all nodes, None if it is not known."""
        return self._found.hour

    def cost(self) -> float | None:
        """Return the cost of the instances until now in USD, None if it is not known. Asks AWS."""
        self._update(self._call.session().account.cluster())
        return self._found.cost().usd

    def _update(self, found: clusters.Cluster) -> None:
        if found.id != self.id:
            what = f"cluster {self.name} ({self.id}) is gone, and {found.id} has its name"
            raise CloudDDPError(what, hint="attach() returns it")
        self._found = found

    def launch(
        self,
        script: str,
        args: Sequence[str] = (),
        *,
        module: bool = False,
        env: Mapping[str, str] | None = None,
        results: bool | str = False,
        **settings: Any,
    ) -> Job:
        """Sync the project, start the ranks on every node, and return the job when they have started.

        `module`: `script` is a module, as in `python -m`. `env` are variables of the ranks; their values are
        not recorded. `results`: put pulled results on the nodes first, those of the newest job or of the one
        with this id, and of the jobs before it. `settings`: of [job]. Raises UsageError before anything is
        sent, CloudDDPError.
        """
        call = self._call.with_settings(flags_of(settings, "job"))
        session = call.session(env)
        script_there = checked_script(session, script_of(script, args, module=module))
        process_nodes.check_role(session.settings)
        folders = results_of(session, results)
        job = NewJob(script_there, None, keep=KEEP_MINUTES)
        with connected(session, whole=True) as (found, runner):
            self._update(found)
            if folders:
                send_files(session, runner, found, folders)
            try:
                start_job(session, runner, found, job).wait()
            except KeyboardInterrupt:
                cancelling.abort_launch(runner, job.id)
                raise
        self._jobs.append(Job(call, job.id, self._jobs))
        return self._jobs[-1]

    def job(self, job_id: str | None = None) -> Job:
        """Return a job of this cluster, by default the newest. Raises CloudDDPError if there is none."""
        with reachable(self._call.session(), required=()) as (found, runner):
            self._update(found)
            return Job(self._call, status.find_job(runner, job_id).id, self._jobs)

    def watch(
        self,
        job_id: str | None = None,
        *,
        times: int = 10,
        on_line: OnLine | None = None,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> JobResult:
        """Follow a job of this cluster, by default the newest, to its end; resume it when a node is lost or
        reboots, at most `times`. Return how it has ended, the last time.

        Arguments as of `Job.wait` and `Job.resume`. Raises UsageError, CloudDDPError as `Job.resume`.
        """
        again = _continuation(self._call, job_id, env, settings, on_line, times)
        self._update(again.cluster)
        try:
            return again.run().ended
        finally:
            self._update(again.cluster)
            if again.job is not None:
                self._jobs.append(Job(self._call, again.job.id, self._jobs))

    def down(self, *, discard: bool = False) -> None:
        """Terminate the nodes, remove everything else, and verify that nothing is left, also where another
        command has removed the cluster.

        Raises Leftovers with what is left and its price. Without `discard` also, with nothing removed, where
        a job runs or results were not pulled.
        """
        self._remove(discard=discard)

    def _remove(self, *, discard: bool = False, unfinished: Sequence[str] = ()) -> None:
        session = self._call.session()
        aws = session.account.aws(finishing=True)
        members = inventory.instances(aws, inventory.with_id(self.id))  # `resume` may have replaced a node
        self._found = clusters.Cluster.of(members, name=self.name, cluster_id=self.id, region=self.region)
        found = self._found if self._found.nodes and not discard else None
        if found and (held := unsaved_work(found, session.settings, aws=aws)):
            raise Leftovers(
                f"cluster {self.name} was not removed: {'; '.join([*held, *unfinished])}",
                hint="wait for the job or cancel it, and pull; or down(discard=True)",
            )
        take_down_id(session, aws, self.id)
        self._jobs.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        reporter, unfinished = self._call.reporter, []
        if not self.created:
            reporter.log(f"cluster {self.name} existed before, and stays up")
            return
        try:
            for job in self._jobs:
                try:
                    if not job.status().status.ended:
                        job.cancel()
                    job.pull()
                except (CloudDDPError, OSError) as error:  # what is not pulled keeps the nodes
                    unfinished.append(f"job {job.id}: {error}")
                    reporter.warn(unfinished[-1])
        finally:  # also after an interrupt: then the nodes stay if they hold anything, and Leftovers says so
            with signals.protected(lambda: reporter.log(STILL_REMOVING)):
                self._remove(unfinished=unfinished)
