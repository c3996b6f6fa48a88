"""`kill`: end every process of a job on this node."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import replace
from pathlib import Path

from agent.jobs import phases, rank_records
from agent.node import processes, store
from cloudddp.agent.protocol.jobs import KillReply, KillRequest
from cloudddp.agent.protocol.phases import JobPhase

REQUEST = KillRequest
POLLS, PAUSE = 100, 0.05  # while the supervisor records the end, which it detects within 50 ms; seconds
REACTION_POLLS = 20  # while the supervisor detects that it has to end the ranks
FINAL = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


def step(request: KillRequest) -> KillReply:
    """A job that is not known yet may be about to start, over another connection: it is marked, so that it
    does not."""
    folder = store.job_folder(request.job)
    with store.locked("jobs"):  # not in the middle of a start
        job = phases.job_file(folder)
        try:
            _mark(folder, request.token)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # a disk that is full prevents the start, too, which writes more
    if job is None:
        return _end_setup(folder, request.grace)
    reply = _end_job(folder, job, request)
    if request.forget and not reply.left and phases.phase_of(folder).ended:
        shutil.rmtree(folder, ignore_errors=True)
    return reply


def _mark(folder: Path, token: str) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = folder / phases.CANCEL_MARK
    if phases.phase_of(folder) not in FINAL and not mark.exists():
        store.replace(mark, token.encode())


def _end_job(folder: Path, job: phases.JobFile, request: KillRequest) -> KillReply:
    task = phases.task(folder, job.node)
    alive = {one.rank for one in rank_records.running(folder)}
    found = len(processes.find(task))
    ended, left = processes.end(task, request.grace, ask=not _supervisor_ends(folder))
    ended = max(ended, found)
    for _ in range(POLLS):
        if phases.phase_of(folder).ended:
            break
        time.sleep(PAUSE)
        late, left = processes.end(task, 0)  # what the supervisor was about to start when this began
        ended += late
    state = phases.recorded(folder)
    if state is not None and state.state is JobPhase.LOST and not left:
        rank_records.settle(folder, rank_records.read(folder), asked=True)
        cancelled = (folder / phases.CANCEL_MARK).exists()
        phase, code = (JobPhase.CANCELLED, 130) if cancelled else (JobPhase.FAILED, 1)
        ended_state = replace(state, state=phase, ended=time.time(), exit_code=code)
        store.write(folder / phases.STATE_FILE, ended_state)
    if phases.cancel_token(folder) == request.token:  # another node may have told this one before
        alive |= {one.rank for one in rank_records.read(folder) if one.asked}
    return KillReply(
        ended,
        left,
        len(alive),
        phase=phases.phase_of(folder),
        training=rank_records.training_status(folder),
        started=bool(rank_records.read(folder)),
    )


def _supervisor_ends(folder: Path) -> bool:
    """Wait until the supervisor sends SIGTERM, as it does for the mark, and return whether it does: a
    launcher gets it once. One that was killed or frozen does not."""
    for _ in range(REACTION_POLLS):
        if (folder / phases.STOPPED_MARK).exists() or phases.phase_of(folder).ended:
            return (folder / phases.STOPPED_MARK).exists()
        time.sleep(PAUSE)
    return False


def _end_setup(folder: Path, grace: float) -> KillReply:
    """End a job's setup if it runs, and reply once the next one may begin."""
    setup = phases.recorded(folder)
    if setup is None or setup.state is not JobPhase.SETUP:
        return KillReply(ended=0, left=0)
    ended, left = processes.end(phases.setup_task(folder, setup.node), grace)
    for _ in range(POLLS):  # the step that runs it detects that its command has ended
        if phases.phase_of(folder) is not JobPhase.SETUP:
            break
        time.sleep(PAUSE)
    return KillReply(ended, left, phase=JobPhase.SETUP)
