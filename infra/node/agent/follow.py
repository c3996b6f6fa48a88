"""`follow`: write a job's logs and states to stdout as frames, until it has ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from agent import jobs, phases, store
from cloudddp.agent.protocol import LAUNCHER_RANK, ExitCode
from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.frames import MAX_PIECE, End, FollowRequest, Heartbeat, Log, encode_frame

REQUEST = FollowRequest
PAUSE = 0.1  # seconds between two polls
# Bytes of each log that are sent between two polls. Without a limit, a rank that writes faster than the network would hide
# the failure of another rank.
MAX_AT_ONCE = 1 << 20


def step(request: FollowRequest) -> int:
    folder = store.job_folder(request.job)
    if not phases.was_started(folder):
        sys.stderr.write(f"no job {request.job} on this node\n")
        return int(ExitCode.NO_JOB)
    out = sys.stdout.buffer
    offsets = dict(request.offsets)
    last_state = b""
    last_heartbeat = time.monotonic()
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
        for rank, path in _log_files(folder):
            begin = offsets.get(rank, 0)
            for offset, data in _new_bytes(path, begin, MAX_COUNT if last else MAX_AT_ONCE):
                out.write(encode_frame(Log(rank, offset, data)))
                offsets[rank] = offset + len(data)
            behind = behind or offsets.get(rank, 0) - begin == MAX_AT_ONCE
        if last:
            out.write(encode_frame(End()))
            out.flush()
            return 0
        out.flush()
        if not behind:
            time.sleep(PAUSE)


def _log_files(folder: Path) -> list[tuple[int, Path]]:
    return [(LAUNCHER_RANK, folder / "launcher.log"), *phases.rank_files(folder, ".log")]


def _new_bytes(path: Path, offset: int, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, data) of what was added until now, in pieces, and at most `limit` bytes of it."""
    try:
        file = store.open_regular(path)
    except OSError:
        return
    with file:
        end = min(os.fstat(file.fileno()).st_size, offset + limit)
        file.seek(offset)
        while offset < end:
            data = file.read(min(MAX_PIECE, end - offset))
            if not data:
                return
            yield offset, data
            offset += len(data)
