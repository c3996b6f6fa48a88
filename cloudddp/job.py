"""The verbs on jobs: launch, sync, cancel, jobs. They return data and raise; they print only progress.

At most three batched steps a node before ranks run: probe (which ships the agent and compares files), apply and
set-up where something changed, start. Jobs live on the nodes, so any laptop with the key sees the same ones.
"""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cloudddp import nodes, ranks, scripts, sync
from cloudddp.cluster import PROJECT, Cluster, Say, probe
from cloudddp.errors import CloudDDPError, Interrupted, NodeError, UsageError
from cloudddp.nodes import Runner
from cloudddp.protocol import (
    ENDED,
    MAX_LISTING,
    ApplyReply,
    JobState,
    KillReply,
    ProbeReply,
    SetupReply,
    StartReply,
    failed_first,
)
from cloudddp.ranks import Host, NodePlan, Script
from cloudddp.spec import Config
from cloudddp.standing import PREEMPTED, Standing, among
from cloudddp.text import one_line, size_of

RESULTS = "results"  # where `pull` puts what it brings; never sent back to the nodes
LONGEST_SCRIPT = 1000  # characters of a script and its arguments, as lists of jobs show them
CLOCK_SKEW = 5.0  # seconds; more confuses "which rank failed first", and certificates


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its nodes remember it. Times are seconds since the epoch; `nodes` are node ranks."""

    id: str
    state: str
    exit_code: int | None
    script: str
    started: float | None
    ended: float | None
    nodes: tuple[int, ...]
    rank_zero: int | None  # the node that ran rank 0
    ranks: int  # how many there are when all have started, on the nodes that answered
    standing: Standing | None = None  # where the training is, if it tells

    @property
    def seconds(self) -> float:
        """How long it has run, or ran; 0 before it starts."""
        return max((self.ended or time.time()) - self.started, 0.0) if self.started else 0.0


def prepare(root: Path, here: Path, script: Script, config: Config, *, fresh: bool = False) -> Script:
    """Check everything that can be known before a node exists; return the script by its path in the project.

    `here` is the folder that the user is in. `fresh`: the nodes will have nothing yet, so all is to be sent. Raises
    UsageError; calls nothing.
    """
    check_inputs(root, config)
    project = snapshot(root, config)
    found = scripts.located(root, here, script, project.manifest, config.job.env)
    if fresh:
        sync.check_size(project, sync.difference(project.manifest, {}), config.sync.max_mb)
        ranks.nproc(config.job, [0] * config.cluster.nodes)  # a list may not fit the nodes
    return found


def check_inputs(root: Path, config: Config) -> None:
    """Raise UsageError for set-up inputs that do not exist. Calls nothing."""
    for name in config.setup.inputs:
        if not (root / name).is_file():
            raise UsageError(f"setup.inputs names {name}, which is not in {root}")


def snapshot(root: Path, config: Config) -> sync.Snapshot:
    """Return the project's files as they will be on the nodes."""
    project = sync.snapshot(root, exclude=config.sync.exclude, keep_out=(*config.job.outputs, RESULTS))
    if len(project.manifest) == 0:
        raise UsageError(f"{root} has no files to send", hint="run cloudddp in the folder of your project")
    return project


def new_id() -> str:
    """Return a job's id: names in their order are jobs in theirs."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def launch(
    runner: Runner, cluster: Cluster, config: Config, script: Script, *, root: Path, say: Say, job_id: str
) -> None:
    """Sync, set up and start the script's ranks on every node; return when all have been started.

    Raises UsageError, NodeError. When one node cannot start, what the others started is ended again; after an
    interrupt that is the caller's part, with `end_started`.
    """
    ranks.nproc(config.job, [0] * len(cluster.nodes))  # a list may not fit the nodes
    project = snapshot(root, config)
    found = probe(runner, cluster, manifest=project.digest, python=config.job.python)
    _check(found, config, say)  # before the files of a job that still runs are touched
    ranks.nproc(config.job, [found[rank].gpus for rank in sorted(found)])
    _bring_in_step(runner, found, config, project, say)
    _set_up(runner, config, script, job_id, say)
    plans = ranks.plan(
        config.job, _hosts(cluster, found, config.job.python), script, job_id=job_id, cluster=cluster.name
    )
    total = sum(p.ranks for p in plans)
    say(
        f"starting job {job_id}: {total} rank{'s' * (total != 1)} on {len(plans)} node{'s' * (len(plans) != 1)}"
    )
    _start(runner, config, script, job_id, plans)


def sync_only(runner: Runner, cluster: Cluster, config: Config, *, root: Path, say: Say) -> None:
    """Bring the project's files to every node."""
    project = snapshot(root, config)
    found = probe(runner, cluster, manifest=project.digest, python=config.job.python)
    if running := next((answer.running[0] for answer in found.values() if answer.running), None):
        say(f"warning: job {running} is running, and its files change under it")
    _bring_in_step(runner, found, config, project, say)


def _bring_in_step(
    runner: Runner, found: Mapping[int, ProbeReply], config: Config, project: sync.Snapshot, say: Say
) -> None:
    """Make the nodes' project folders like ours: one round trip, none where nothing changed."""
    todo = {
        rank: sync.difference(project.manifest, sync.from_wire(answer.manifest))
        for rank, answer in found.items()
        if answer.manifest is not None
    }
    if not todo:
        say(f"files are up to date on every node ({len(project.manifest)} files)")
        return
    largest = max(todo.values(), key=lambda difference: difference.size)
    sync.check_size(project, largest, config.sync.max_mb)
    for rank, difference in todo.items():
        free = found[rank].disk_free
        if free < difference.size + (64 << 20):
            raise NodeError(f"node {rank}: {free >> 20} MiB free, too little for the project")
    say(
        f"sending {len(largest.send)} file{'s' * (len(largest.send) != 1)}, {size_of(largest.size)}, to {len(todo)} node{'s' * (len(todo) != 1)}"
        + (f"; deleting {len(largest.delete)}" if largest.delete else "")
    )
    runner.each(
        lambda rank: (
            nodes.call(
                runner,
                rank,
                "apply",
                f"--project={PROJECT}",
                answer=ApplyReply,
                stdin=sync.stream(project, todo[rank]),
                timeout=600,
            )
            if rank in todo
            else None
        )
    ).all()


def _check(found: Mapping[int, ProbeReply], config: Config, say: Say) -> None:
    now = datetime.now(UTC).timestamp()
    for rank, answer in found.items():
        if answer.running:
            job = answer.running[0]
            raise CloudDDPError(
                f"job {job} is still running on node {rank}",
                hint=f"`cloudddp logs -f {job}` shows it, `cloudddp cancel {job}` ends it",
            )
        if not answer.python and not (config.job.python and config.setup.run):  # set-up may yet make it
            what = f"no {config.job.python}" if config.job.python else "no Python found"
            raise NodeError(f"node {rank}: {what}", hint="set job.python to its path on the nodes")
        if abs(answer.time - now) > CLOCK_SKEW:
            say(
                f"warning: the clock of node {rank} differs from this computer's by {answer.time - now:+.0f} s"
            )
    counts = {answer.gpus for answer in found.values()}
    if len(counts) > 1:
        say(f"warning: the nodes show different numbers of GPUs: {sorted(counts)}")


def _hosts(cluster: Cluster, found: Mapping[int, ProbeReply], wanted: str) -> list[Host]:
    return [
        Host(
            rank=rank,
            private_ip=cluster.nodes[rank].private_ip,
            interface=answer.interface,
            gpus=answer.gpus,
            cpus=answer.cpus,
            python=answer.python or wanted,
            free_port=answer.free_port,
        )
        for rank, answer in sorted(found.items())
    ]


def _set_up(runner: Runner, config: Config, script: Script, job_id: str, say: Say) -> None:
    if not config.setup.run:
        return
    say("running the set-up commands where they have not run yet")
    common = {
        "job": job_id,
        "script": shown(script),
        "commands": config.setup.run,
        "inputs": config.setup.inputs,
        "env": config.job.env,
    }
    try:
        answers = runner.each(
            lambda rank: nodes.call(
                runner,
                rank,
                "setup",
                f"--project={PROJECT}",
                answer=SetupReply,
                stdin=json.dumps({**common, "node": rank}).encode(),
                timeout=None,
            )
        ).all()
    except Exception:  # the other nodes continue with it
        end_started(runner, job_id)
        raise
    if any(answer.cancelled for answer in answers.values()):
        raise Interrupted(
            f"job {job_id} was cancelled during its set-up", hint="`cloudddp launch` starts it again"
        )
    for rank, answer in answers.items():
        if answer.exit_code:
            raise NodeError(
                f"node {rank}: set-up command exited {answer.exit_code}: {one_line(answer.command)}\n"
                + "\n".join(f"  | {one_line(line)}" for line in answer.output.splitlines()[-40:]),
                hint="correct it in [setup] of cloudddp.toml and repeat the launch; files are already there",
            )


def shown(script: Script) -> str:
    """Return the script and its arguments as lists of jobs show them."""
    return one_line(shlex.join(script.argv), LONGEST_SCRIPT)


def _start(runner: Runner, config: Config, script: Script, job_id: str, plans: Sequence[NodePlan]) -> None:
    common = {
        "job": job_id,
        "project": PROJECT,
        "script": shown(script),
        "max_restarts": config.job.max_restarts,
        "stop_grace": config.job.stop_grace,
    }
    stdin = {plan.node: json.dumps({**plan.to_json(), **common}).encode() for plan in plans}
    try:
        runner.each(
            lambda rank: nodes.call(runner, rank, "start", answer=StartReply, stdin=stdin[rank])
        ).all()
    except Exception:  # some nodes may have begun
        end_started(runner, job_id)
        raise


def _kill(runner: Runner, rank: int, job_id: str, grace: float) -> KillReply:
    options = (f"--job={job_id}", "--cancel", f"--grace={grace:g}")
    return nodes.call(runner, rank, "kill", *options, answer=KillReply, timeout=grace + 60)


def end_started(runner: Runner, job_id: str, *, grace: float = 1.0) -> list[int]:
    """End what a broken-off start has begun, if anything; return the nodes of which that is not certain.

    By new connections, as the failure or the interrupt has closed the old ones.
    """

    def end(rank: int) -> bool:
        runner.reconnect(rank)
        return bool(_kill(runner, rank, job_id, grace).left)

    outcome = runner.each(end, fatal=lambda _: False)
    return sorted({*outcome.errors, *(rank for rank, left in outcome.values.items() if left)})


# -- looking back ------------------------------------------------------------------------------------------


def jobs(runner: Runner) -> list[JobRecord]:
    """Return the jobs that the nodes know, newest last."""
    answers = nodes.call_all(runner, "jobs", answer=tuple[JobState, ...], ship=True, limit=MAX_LISTING)
    merged: dict[str, dict[int, JobState]] = {}
    for node, states in answers.items():
        for state in states:
            merged.setdefault(state.job, {})[node] = state
    return [_record(job_id, states) for job_id, states in sorted(merged.items())]


def _record(job_id: str, states: Mapping[int, JobState]) -> JobRecord:
    words = [state.state for state in states.values()]
    state: str = next(
        (word for word in ("running", "starting", "setup", "lost", "cancelled", "failed") if word in words),
        words[0],
    )
    before = failed_first(states.values()) if state == "cancelled" else None
    if before is not None:  # a cancel of what was left of it does not make it another job
        state = "failed"
    failed = [
        (rank.ended, rank.exit_code)
        for one in states.values()
        for rank in one.ranks
        if rank.exit_code
        and rank.ended is not None
        and not (one.stopping and rank.signal == signal.SIGTERM)  # told to stop: not what failed
    ]
    if state == "failed" and any(one.ranks for one in states.values()):
        code = before.exit_code if before is not None else min(failed)[1] if failed else None
    else:
        codes = [one.exit_code for one in states.values() if one.exit_code]
        code = next(iter(codes), 0 if state == "succeeded" else None)
    rank_zero = [node for node, one in states.items() if any(rank.rank == 0 for rank in one.ranks)]
    standing = among(one.standing for one in states.values())
    preempted = state == "failed" and code == PREEMPTED and standing is not None and standing.preempted
    return JobRecord(
        id=job_id,
        state="preempted" if preempted else state,
        exit_code=code if state in ENDED else None,
        script=one_line(next(iter(states.values())).script, LONGEST_SCRIPT),
        started=min((one.started for one in states.values() if one.started is not None), default=None),
        ended=max((one.ended or 0.0 for one in states.values()), default=None) if state in ENDED else None,
        nodes=tuple(sorted(states)),
        rank_zero=rank_zero[0] if rank_zero else None,
        ranks=sum(one.expected or 0 for one in states.values()),
        standing=standing,
    )


def find(known: Sequence[JobRecord], wanted: str | None) -> JobRecord:
    """Return the job of that id (or its unique beginning), or the newest. Raises CloudDDPError for none."""
    if not known:
        raise CloudDDPError(
            "no job has been launched on this cluster", hint="start one: cloudddp launch SCRIPT"
        )
    if wanted is None:
        return known[-1]
    matching = [record for record in known if record.id.startswith(wanted)]
    exact = [record for record in matching if record.id == wanted]
    if len(exact or matching) != 1:
        raise CloudDDPError(
            f"no single job {wanted!r} on this cluster", hint="jobs: " + ", ".join(r.id for r in known)
        )
    return (exact or matching)[0]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel ended on all nodes, and where the training was."""

    ranks: int
    processes: int
    setup: bool  # the job was still in its set-up
    standing: Standing | None

    @property
    def text(self) -> str:
        """`3 ranks ended`, or '' where nothing ran."""
        if self.ranks:
            return f"{self.ranks} rank{'s' * (self.ranks != 1)} ended"
        if self.setup:
            return "its set-up was ended"
        return "processes left behind by its ranks were ended" if self.processes else ""


def cancel(runner: Runner, job_id: str, *, grace: float) -> Cancelled:
    """End every rank of a job on every node, or its set-up.

    Raises NodeError where processes are left, or a node could not be asked.
    """
    outcome = runner.each(
        lambda rank: _kill(runner, rank, job_id, grace),
        fatal=lambda _: False,
    )
    answers = outcome.all()
    left = {rank: answer.left for rank, answer in answers.items() if answer.left}
    if left:
        raise NodeError(
            "processes are left: " + ", ".join(f"{count} on node {rank}" for rank, count in left.items()),
            hint="repeat the cancel; `cloudddp down` ends everything",
        )
    return Cancelled(
        ranks=sum(answer.ranks for answer in answers.values()),
        processes=sum(answer.ended for answer in answers.values()),
        setup=any(answer.state == "setup" for answer in answers.values()),
        standing=among(answer.standing for answer in answers.values()),
    )
