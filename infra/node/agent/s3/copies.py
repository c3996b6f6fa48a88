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
import select
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Optional

from agent.files.checkpoints import parts
from agent.files.paths import on_one_line
from agent.files.scan import Scan, below
from agent.files.sparse import sent_size
from agent.files.tree import Found, OnSkipped
from agent.jobs import phases
from agent.node import kernel, store
from agent.node.commands import later, program
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
    url_of,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.results import EVIDENCE
from cloudddp.agent.protocol.start import StartRequest

SMALL = 1 << 20  # bytes; smaller files are copied first
PAUSE = 2.0  # seconds before files that could not be sent are tried again
MARGIN = 5.0  # seconds before the deadline at which the copy ends
ANSWER = 30.0  # seconds for S3 to answer, or half of the patience
STATE_SECONDS = 10.0  # for the last object, which says what was copied


@frozen
class File:
    """A file to copy, or with `path` None a symbolic link, whose target is in the metadata. A log may have a
    hole, which is not copied."""

    path: Optional[str]
    key: str
    metadata: dict[str, str] = field(default_factory=dict)
    is_log: bool = False


def check(request: StartRequest, destination: Destination) -> str:
    """Return why this node cannot copy results, or ''. It uploads the job's state, so that a missing
    permission is known before the ranks start."""
    folder = store.job_folder(request.job)
    state = File(str(folder / phases.STATE_FILE), destination.key(request.node, LOGS, phases.STATE_FILE))
    ends = time.monotonic() + 2 * request.gang.join  # the import of boto3 from a cold disk takes longest
    upload = _Upload(request, destination, [state])
    upload.run(ends)
    return f"results cannot be copied to {destination.url}: {upload.why}"[:MAX_NOTE] if upload.left else ""


def copy(request: StartRequest, destination: Destination, node_ends: float) -> bool:
    """Copy a job's results from this node, and return whether all was copied. `node_ends`: when the node
    ends, by the monotonic clock."""
    folder = store.job_folder(request.job)
    ends = min(time.monotonic() + destination.limit, node_ends - MARGIN)
    url = url_of(destination.bucket, destination.key(request.node))
    record = Copied(url, CopyPhase.COPYING, rank_zero=(folder / "ranks" / "0.json").exists())
    try:
        _write(folder, record)
        record = _copied(request, destination, ends, record)
    except (Exception, SystemExit) as error:  # nothing here may keep the node
        text = f"{type(error).__name__}: {error}"[:MAX_NOTE]
        record = replace(record, phase=CopyPhase.INCOMPLETE, error=text)
    _write(folder, record)
    with contextlib.suppress(Exception, SystemExit):
        report = File(str(folder / phases.COPIED_FILE), destination.key(request.node, REPORT))
        report_ends = min(ends + MARGIN, time.monotonic() + STATE_SECONDS)
        _Upload(request, destination, [report]).run(report_ends)
    return record.phase is CopyPhase.COMPLETE


def _write(folder: Path, record: Copied) -> None:
    with contextlib.suppress(OSError):
        store.write(folder / phases.COPIED_FILE, record)


def _copied(request: StartRequest, destination: Destination, ends: float, record: Copied) -> Copied:
    """Copy until `ends`, and return what was copied."""
    left_out: dict[str, bool] = {}  # what is not copied, and why; whether it may be a result

    def leave_out(name: str, reason: str, *, counts: bool = True) -> None:
        if reason:  # else it does not exist
            left_out[f"{on_one_line(name)[: MAX_NOTE // 2]}: {on_one_line(reason)}"] = counts

    folder = store.job_folder(request.job)
    files = _files(request, destination, folder, leave_out)
    upload = _Upload(request, destination, files)
    completed = time.monotonic()  # when the last file was
    while True:
        before = len(upload.left)
        upload.run(ends)
        now = time.monotonic()
        completed = now if len(upload.left) < before else completed
        record = replace(record, files=upload.done, size=upload.size, expected=len(files))
        over = now - completed > destination.patience or now + PAUSE > ends
        if not upload.left or upload.is_denied or over:
            break
        _write(folder, record)
        time.sleep(PAUSE)
    error = upload.why if upload.left else ""
    if error and not upload.is_denied:
        error = f"{len(upload.left)} files were not copied in time: {error}"
    prefix = destination.key(request.node, OUTPUTS) + "/"
    outputs = [one.key[len(prefix) :] for one in files if one.key.startswith(prefix)]
    complete = record.files == len(files) and not any(left_out.values())
    return replace(
        record,
        phase=CopyPhase.COMPLETE if complete else CopyPhase.INCOMPLETE,
        left_out=len(left_out),
        error=error[:MAX_NOTE],
        notes=tuple([line[:MAX_NOTE] for line in (*left_out, *upload.lost)[:MAX_NOTES]]),
        checkpoints=parts(store.project_folder(request.project), map(os.path.dirname, outputs)),
    )


# -- which files -------------------------------------------------------------------------------------------


def _files(request: StartRequest, destination: Destination, folder: Path, left_out: OnSkipped) -> list[File]:
    """Return what `pull` would bring, and the state of the job: small files first, then the newest outputs (a
    node that is about to end may not get further), then long logs."""
    project, began = store.project_folder(request.project), phases.began_at(folder)
    if destination.outputs:
        outputs = below(project, destination.outputs, left_out)
    else:  # what was written since the job began
        scan = Scan(project, (), destination.scratch, began, again=began, seconds=math.inf, left_out=left_out)
        outputs = (one.found for one in scan)
    logs = below(folder, EVIDENCE, left_out, every=True)
    found = {(part, one.name): one for part, every in ((OUTPUTS, outputs), (LOGS, logs)) for one in every}

    def order(item: tuple[tuple[str, str], Found]) -> tuple[bool, bool, int]:
        (part, _), one = item
        return one.info.st_size > SMALL, part == LOGS, -one.info.st_mtime_ns

    files: dict[str, File] = {}
    for (part, name), one in sorted(found.items(), key=order):
        # Keys are UTF-8, and S3 advises against control characters.
        key = destination.key(request.node, part, on_one_line(name))
        if stat.S_ISDIR(one.info.st_mode):
            continue
        if key in files:
            left_out(name, "its key in S3 is that of another file")
        elif len(key.encode()) > MAX_KEY:
            left_out(name, f"its key in S3 would be longer than {MAX_KEY} bytes")
        elif not (one.target.isascii() and one.target.isprintable()):
            left_out(name, f"a link to {one.target}", counts=False)
        elif part == OUTPUTS or sent_size(one, left_out) is not None:
            link = {LINK: one.target} if one.target else {}
            metadata = {MTIME: str(one.info.st_mtime_ns), **link}
            files[key] = File(None if link else one.path, key, metadata, part == LOGS)
    return list(files.values())


# -- the process that uploads ------------------------------------------------------------------------------


class _Upload:
    """What became of the files, by their numbers. `left` has those that were not copied yet, and why;
    `is_denied`: none of them can be."""

    def __init__(self, request: StartRequest, destination: Destination, files: Sequence[File]) -> None:
        self._request, self._destination, self._files = request, destination, files
        self.left = dict.fromkeys(range(len(files)), "")
        self.lost: list[str] = []
        self.done = self.size = 0
        self.why, self.is_denied = "", False

    def run(self, ends: float) -> None:
        """Upload what is left, once. Give up at `ends`, and when there is no progress."""
        word, project = self._request.work.program, store.project_folder(self._request.project)
        wanted = {
            "bucket": self._destination.bucket,
            "seconds": min(ANSWER, max(self._destination.patience / 2, 1.0)),
            "files": [{"number": number, **vars(self._files[number])} for number in self.left],
        }
        try:
            argv = boto_process.command([program(word, project)] if word else [], "upload")
        except boto_process.CannotStart as error:
            self.why, self.is_denied = str(error), True
            return
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=boto_process.environment(),
            cwd="/",
            start_new_session=True,
            preexec_fn=kernel.death_signal(signal.SIGKILL),
        )
        stdin, process.stdin = process.stdin, None  # of a thread: the process may never read it
        later(lambda: _feed(stdin, json.dumps(wanted).encode()))
        with process:
            try:
                why = self._follow(process.stdout.fileno(), ends)  # type: ignore[union-attr]  # a pipe
            except (ValueError, TypeError, KeyError) as error:
                why = f"the upload has reported {str(error)[:100]!r}"
            finally:
                process.kill()
        if not self.is_denied:
            self.why = (
                next(filter(None, self.left.values()), why)
                or f"the upload ended with code {process.returncode}"
            )

    def _follow(self, stdout: int, ends: float) -> str:
        """Take what the process reports; return why it was given up, '' at its end."""
        moved, rest = time.monotonic(), b""
        while not self.is_denied:
            until = min(ends, moved + self._destination.patience)
            if not select.select([stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
                over = time.monotonic() >= ends
                return "the time is over" if over else f"no progress for {self._destination.patience:.0f} s"
            if not (data := os.read(stdout, 1 << 16)):
                break
            moved = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b'{"'):  # a sitecustomize may print, too
                    self._take(**json.loads(line))
        return ""

    def _take(
        self, *, number: int = -1, size: int = 0, lost: str = "", left: str = "", fatal: str = ""
    ) -> None:
        """Take a line of upload.py."""
        if fatal:
            self.why, self.is_denied = fatal, True
        elif left:
            self.left[number] = left
        else:
            del self.left[number]
            self.lost += [f"{self._files[number].key}: {lost}"] if lost else []
            self.done, self.size = self.done + (not lost), self.size + size


def _feed(stdin: Any, data: bytes) -> None:
    with contextlib.suppress(OSError), stdin:  # the process has ended
        stdin.write(data)
