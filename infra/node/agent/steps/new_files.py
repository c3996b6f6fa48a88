"""`new_files`: list the files that jobs wrote into the project and that were not pulled yet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from agent.files.checkpoints import parts
from agent.files.scan import Scan
from agent.files.selection import NewFile, choose
from agent.jobs import job_record, phases
from agent.node import store
from cloudddp.agent.protocol.checkpoints import Part
from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.results import (
    MAX_PLACES,
    JobFiles,
    NewFiles,
    NewFilesReply,
    NewFilesRequest,
    NewPath,
    SkippedFile,
)

REQUEST = NewFilesRequest


Places = dict[str, list[int]]  # place -> [files, bytes]


def step(request: NewFilesRequest) -> NewFilesReply:
    project = store.project_folder(request.project)
    now = _file_clock()
    folders = [f for f in phases.job_folders() if phases.was_started(f)]
    chosen = [f for f in folders if request.job in ("", f.name)]
    begins = sorted((phases.began_at(f), f.name) for f in chosen)
    found: dict[str, tuple[Places, Places]] = {}  # job -> those that a pull takes, and others
    complete = True
    left: dict[str, str] = {}
    have: tuple[Part, ...] = ()
    if begins:
        scan = Scan(project, request.outputs, request.scratch, begins[0][0], present=request.present)
        for new, is_taken in _taken(scan, request.limit):
            job = [name for began, name in begins if began <= new.ctime][-1]
            place = found.setdefault(job, ({}, {}))[not is_taken].setdefault(new.place, [0, 0])
            place[0] += 1
            place[1] += new.size
        complete = not scan.late
        left = scan.left
        have = parts(project, scan.shards, request.present)
    listed = [JobFiles(job, *map(_summary, places)) for job, places in sorted(found.items())]
    running = [job for job in phases.running_jobs() if request.job in ("", job)]
    return NewFilesReply(
        time_ns=now,
        complete=complete,
        rank_zero=any((f / "ranks" / "0.json").exists() for f in chosen),
        running=tuple(running[-MAX_PLACES:]),
        jobs=tuple(listed[-MAX_PLACES:]),
        checkpoints=have,
        elsewhere=job_record.elsewhere(store.job_folder(begins[-1][1]), project) if begins else {},
        left=tuple([SkippedFile(name, why[:MAX_REASON]) for name, why in sorted(left.items())[:MAX_PLACES]]),
    )


def _taken(scan: Scan, limit: int) -> Iterator[tuple[NewFile, bool]]:
    """Yield each new file, and whether a pull takes it."""
    if scan.outputs:
        yield from ((new, new.place in scan.outputs) for new in scan)
        return
    taken, left = choose(list(scan), limit)
    yield from ((new, True) for new in taken)
    yield from ((new, False) for files in left.values() for new in files)


def _file_clock() -> int:
    """Return the time by the file system's clock, in ns since the epoch."""
    path = store.ROOT / f".clock-{os.getpid()}"
    try:
        store.create_root()
        path.touch()
        return phases.ctime(path)
    except OSError:  # the disk is full
        return time.time_ns() - 100_000_000
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _summary(places: Places) -> NewFiles:
    largest = sorted(places.items(), key=lambda item: -item[1][1])[:MAX_PLACES]
    return NewFiles(
        files=sum(count for count, _ in places.values()),
        size=sum(size for _, size in places.values()),
        paths=tuple([NewPath(name, count, size) for name, (count, size) in largest]),
    )
