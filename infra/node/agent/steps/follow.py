"""`follow`: write a job's logs and states to stdout as frames, until it has ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from agent.jobs import phases
from agent.node import store
from agent.ranks import rank_log
from agent.steps import jobs
from cloudddp.agent.protocol import LAUNCHER_RANK, SETUP_RANK, ExitCode
from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.frames import End, FollowRequest, Heartbeat, Log, encode_frame

REQUEST = FollowRequest
PAUSE = 0.1  # seconds between two polls
FIRST_PAUSE = 0.03  # likewise, until a rank has written something: the user waits for it
# Bytes of each log that are sent between two polls. Without a limit, a rank that writes faster than the
# network would hide the failure of another rank.
MAX_AT_ONCE = 1 << 20


def step(request: FollowRequest) -> int:
    folder = store.job_folder(request.job)
    if not phases.is_known(folder):
        sys.stderr.write(f"no job {request.job} on this node\n")
        return int(ExitCode.NO_JOB)
    out = sys.stdout.buffer
    offsets = {**_starts(request, folder), **request.offsets}
    for rank in sorted(offsets.keys() - request.offsets.keys()):
        out.write(encode_frame(Log(rank, offsets[rank], b"")))
    last_state = b""
    last_heartbeat = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        if time.monotonic() - last_heartbeat > request.heartbeat:
            last_heartbeat = time.monotonic()
            out.write(encode_frame(Heartbeat()))
        state = jobs.state_of(folder)  # before the logs: all that was written until now is read below
        frame = encode_frame(state)
        if frame != last_state:
            last_state = frame
            out.write(frame)
        last = state.phase.ended or not request.wait
        behind = False
        for rank, path in _log_files(request, folder):
            sent = 0
            for piece in rank_log.new_frames(
                rank, path, offsets.get(rank, 0), MAX_COUNT if last else MAX_AT_ONCE
            ):
                out.write(encode_frame(piece))
                offsets[rank] = piece.end
                sent += len(piece.data)
                pause = PAUSE if rank != LAUNCHER_RANK else pause
            behind = behind or sent == MAX_AT_ONCE
        if last:
            out.write(encode_frame(End()))
            out.flush()
            return 0
        out.flush()
        if not behind:
            time.sleep(pause)


def _log_files(request: FollowRequest, folder: Path) -> list[tuple[int, Path]]:
    setup = [(SETUP_RANK, folder / phases.SETUP_LOG)] if request.setup else []
    files = [*setup, (LAUNCHER_RANK, folder / "launcher.log"), *phases.rank_files(folder, ".log")]
    return [(rank, path) for rank, path in files if not request.ranks or rank in request.ranks]


def _starts(request: FollowRequest, folder: Path) -> dict[int, int]:
    """Return where to begin each log that exists. A log that appears later is sent from its beginning."""
    if request.since is None and request.tail is None:
        return {}
    return {
        rank: rank_log.start_of(path, request.since, request.tail)
        for rank, path in _log_files(request, folder)
        if path.exists()
    }
