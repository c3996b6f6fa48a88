"""Copies of a job's results to Amazon S3, by this node, when the job has ended.

The upload is s3transfer's work, in a process of its own (upload.py): a Python of the node has boto3, which
knows the endpoints of all partitions, renews the credentials of the node's role, signs, sends large files in
parts and tries again. `aws s3 sync` either follows links out of the results or drops those inside them, and
does not say which files are missing. This process chooses the files, and records what was copied.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Optional

from agent.files.checkpoints import parts
from agent.files.paths import on_one_line
from agent.files.scan import Scan, below
from agent.files.tree import Found
from agent.jobs import phases
from agent.node import kernel, store
from agent.node.commands import program
from agent.s3 import boto_process
from cloudddp.agent.protocol.copies import (
    LINK,
    LOGS,
    MAX_KEY,
    MAX_NOTE,
    MAX_NOTES,
    MTIME,
    OUTPUTS,
    REPORT,
    Copied,
    CopyPhase,
    Destination,
    node_prefix,
    url_of,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.results import EVIDENCE
from cloudddp.agent.protocol.start import StartRequest

CHECK_SECONDS = 10.0  # for the upload that is tried before ranks start
SMALL = 1 << 20  # bytes; smaller files are copied first
PAUSE = 2.0  # seconds before files that could not be sent are tried again
MARGIN = 5.0  # seconds before the deadline at which the copy ends
GRACE = 2.0  # seconds for the upload to report after its end
STATE_SECONDS = 10.0  # for the last object, which says what was copied


@frozen
class File:
    """A file to copy, or with `path` None a symbolic link, whose target is in the metadata. `size`: bytes."""

    path: Optional[str]
    key: str
    size: int = 0
    mtime_ns: int = 0
    log: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def check(request: StartRequest, destination: Destination) -> str:
    """Return why this node cannot copy results, or ''. It uploads the job's state, so that a missing
    permission is known before the ranks start."""
    folder = store.job_folder(request.job)
    state = File(str(folder / phases.STATE_FILE), _key(destination, request.node, LOGS, phases.STATE_FILE))
    ends = time.monotonic() + min(CHECK_SECONDS, request.gang.join / 2)
    found = _upload(request, destination, [state], ends)
    why = found.fatal or (found.why if found.left else "")
    url = url_of(destination.bucket, destination.prefix)
    return f"results cannot be copied to {url}: {why}"[:MAX_NOTE] if why else ""


class Copy:
    """The copy of a job's results from this node. `ends`: when the node ends, by the monotonic clock."""

    def __init__(self, request: StartRequest, destination: Destination, ends: float) -> None:
        self._request, self._destination = request, destination
        self._folder = store.job_folder(request.job)
        self._ends = min(time.monotonic() + destination.limit, ends - MARGIN)

    def run(self) -> bool:
        """Copy, and return whether all was copied."""
        url = url_of(self._destination.bucket, node_prefix(self._destination.prefix, self._request.node))
        rank_zero = (self._folder / "ranks" / "0.json").exists()
        record = Copied(url, CopyPhase.COPYING, rank_zero=rank_zero)
        try:
            self._write(record)
            record = self._copy(record)
        except (Exception, SystemExit) as error:  # nothing here may keep the node
            text = f"{type(error).__name__}: {error}"[:MAX_NOTE]
            record = replace(record, phase=CopyPhase.INCOMPLETE, error=text)
        self._write(record)
        with contextlib.suppress(Exception, SystemExit):
            report = File(
                str(self._folder / phases.COPIED_FILE), _key(self._destination, self._request.node, REPORT)
            )
            ends = min(self._ends + MARGIN, time.monotonic() + STATE_SECONDS)
            _upload(self._request, self._destination, [report], ends)
        return record.phase is CopyPhase.COMPLETE

    def _write(self, record: Copied) -> None:
        with contextlib.suppress(OSError):
            store.write(self._folder / phases.COPIED_FILE, record)

    def _copy(self, record: Copied) -> Copied:
        notes = _Notes()
        files = list(_files(self._request, self._destination, self._folder, notes))
        left, lost, found = files, list(notes.lines), _Outcome()
        completed = time.monotonic()  # when the last file was
        while left:
            found = _upload(self._request, self._destination, left, self._ends)
            now = time.monotonic()
            completed = now if len(found.left) < len(left) else completed
            lost += found.lost
            record = replace(
                record,
                files=record.files + found.done,
                size=record.size + found.size,
                expected=len(files),
            )
            left = [left[number] for number in found.left]
            over = now - completed > self._destination.patience or now + PAUSE > self._ends
            if not left or found.fatal or over:
                break
            self._write(record)
            time.sleep(PAUSE)
        error = found.fatal
        if left and not error:
            error = f"{len(left)} files were not copied in time: {found.why}"
        prefix = _key(self._destination, self._request.node, OUTPUTS) + "/"
        outputs = [one.key[len(prefix) :] for one in files if not one.log]
        complete = not error and record.files == len(files) and not notes.lost
        return replace(
            record,
            phase=CopyPhase.COMPLETE if complete else CopyPhase.INCOMPLETE,
            left_out=notes.count,
            error=error[:MAX_NOTE],
            notes=tuple(line[:MAX_NOTE] for line in lost[:MAX_NOTES]),
            checkpoints=parts(store.project_folder(self._request.project), map(os.path.dirname, outputs)),
        )


# -- which files -------------------------------------------------------------------------------------------


class _Notes:
    """What is not copied, and why. `lost` of them may be results."""

    def __init__(self) -> None:
        self.count = self.lost = 0
        self.lines: list[str] = []

    def left_out(self, name: str, reason: str, *, counts: bool = True) -> None:
        if not reason:
            return  # it does not exist
        self.count += 1
        self.lost += counts
        if self.count <= MAX_NOTES:
            self.lines.append(f"{on_one_line(name)[: MAX_NOTE // 2]}: {on_one_line(reason)}")


def _files(request: StartRequest, destination: Destination, folder: Path, notes: _Notes) -> Iterator[File]:
    """Return what `pull` would bring, and the state of the job: small files first, then the newest outputs (a
    node that is about to end may not get further), then long logs."""
    project, began = store.project_folder(request.project), phases.began_at(folder)
    if destination.outputs:
        outputs = below(project, destination.outputs, notes.left_out)
    else:  # what was written since the job began
        scan = Scan(
            project, (), destination.scratch, began, again=began, seconds=math.inf, left_out=notes.left_out
        )
        outputs = (one.found for one in scan)
    logs = below(folder, EVIDENCE, notes.left_out, every=True)
    found = [
        *_keyed(outputs, _key(destination, request.node, OUTPUTS), notes),
        *_keyed(logs, _key(destination, request.node, LOGS), notes, log=True),
    ]
    return iter(sorted(found, key=lambda one: (one.size > SMALL, one.log, -one.mtime_ns)))


def _keyed(found: Iterable[Found], prefix: str, notes: _Notes, *, log: bool = False) -> Iterator[File]:
    seen: dict[str, str] = {}
    for one in found:
        shown = on_one_line(one.name)
        if shown not in seen:
            seen[shown] = one.name
            yield from _file(one, prefix, notes, log=log)
        elif seen[shown] != one.name:  # else a root lies in another one
            notes.left_out(one.name, "its key in S3 is that of another file")


def _file(one: Found, prefix: str, notes: _Notes, *, log: bool) -> Iterator[File]:
    if stat.S_ISDIR(one.info.st_mode):
        return
    # Keys are UTF-8, and S3 advises against control characters.
    key, mtime_ns = f"{prefix}/{on_one_line(one.name)}", one.info.st_mtime_ns
    metadata = {MTIME: str(mtime_ns)}
    if len(key.encode()) > MAX_KEY:
        notes.left_out(one.name, f"its key in S3 would be longer than {MAX_KEY} bytes")
    elif not one.target:
        yield File(one.path, key, one.info.st_size, mtime_ns, log, metadata)
    elif one.target.isascii() and one.target.isprintable():
        yield File(None, key, 0, mtime_ns, log, {**metadata, LINK: one.target})
    else:
        notes.left_out(one.name, f"a link to {one.target}", counts=False)


def _key(destination: Destination, node: int, *names: str) -> str:
    return "/".join([node_prefix(destination.prefix, node), *names])


# -- the process that uploads ------------------------------------------------------------------------------


@frozen
class _Outcome:
    """What upload.py reports."""

    done: int = 0
    size: int = 0
    lost: Sequence[str] = ()
    left: Sequence[int] = ()
    why: str = ""
    fatal: str = ""


def _upload(request: StartRequest, destination: Destination, files: Sequence[File], ends: float) -> _Outcome:
    """Upload files once. Give up at `ends`, and when there is no progress."""
    left = range(len(files))
    python = boto_process.find(_own(request))
    if problem := boto_process.problem(_own(request), python):
        return _Outcome(left=left, fatal=problem)
    wanted = {
        "bucket": destination.bucket,
        "region": boto_process.region(),
        "patience": destination.patience,
        "ends": ends,
        "files": [{"path": one.path, "key": one.key, "metadata": one.metadata} for one in files],
    }
    try:
        done = subprocess.run(
            boto_process.command(python, "upload"),
            input=json.dumps(wanted).encode(),
            stdout=subprocess.PIPE,
            env=boto_process.environment(),
            cwd="/",
            start_new_session=True,
            preexec_fn=kernel.death_signal(signal.SIGKILL),
            timeout=max(ends - time.monotonic(), 0.0) + GRACE,
            check=False,
        )
        return _Outcome(**json.loads(done.stdout.rpartition(b"\n")[2]))  # a sitecustomize may print, too
    except subprocess.TimeoutExpired:
        return _Outcome(left=left, why="the time is over")
    except (ValueError, TypeError):
        return _Outcome(left=left, why=f"the upload ended with code {done.returncode}")


def _own(request: StartRequest) -> list[str]:
    word = request.program
    return [program(word, store.project_folder(request.project))] if word else []
