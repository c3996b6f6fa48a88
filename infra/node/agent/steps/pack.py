"""`pack`: send files and folders of the project, or of a job's own folder, to the laptop, as far as it does
not have them.

The stream is described in cloudddp/agent/protocol/files.py.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

from agent.files.paths import on_one_line
from agent.files.scan import Scan
from agent.files.selection import choose
from agent.files.sparse import WithoutHoles, data_of
from agent.files.tree import Found, Tree
from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.files import End, Entry, LeftOut, PackRequest, Selection, Total, Work

REQUEST = PackRequest
EMPTY = 1 << 26  # bytes of holes that may be sent as zeros
BLOCK = 1 << 18  # bytes that are read and sent at once
BUFFER = 1 << 17  # bytes of small files that are sent together
QUIET_SECONDS = 5.0  # after which a frame says that the agent works
RECENT_NS = 10**9  # after a write so long ago another one has another time, by the clock of any file system


def step(request: PackRequest) -> None:
    """What cannot be sent (an unreadable file, a pipe) is named at the end of the stream; the other files are
    still sent."""
    folder = store.job_folder(request.job) if request.job else store.project_folder(request.project)
    roots = [os.path.normpath(name) for name in request.paths]
    notes = Notes()
    with io.BufferedWriter(io.FileIO(sys.stdout.fileno(), "wb", closefd=False), BUFFER) as stream:
        packer = Packer(Output(stream), str(folder), roots, notes, request)
        packer.send()


class Output:
    """The stream of frames."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._last = time.monotonic()
        self._looked = self._hashed = 0
        stream.write(files.MAGIC)

    def send(self, frames: bytes) -> None:
        self._stream.write(frames)

    def data(self, piece: bytes) -> None:
        self._stream.write(files.PREFIX.pack(files.DATA, len(piece)))
        self._stream.write(piece)
        self._last = time.monotonic()

    def working(self, *, looked: int = 0, hashed: int = 0) -> None:
        """Count files that were looked at and bytes that were hashed, and report them while there is nothing
        to send."""
        self._looked += looked
        self._hashed += hashed
        if time.monotonic() - self._last > QUIET_SECONDS:
            self._stream.write(files.encode_wait(Work(self._looked, self._hashed)))
            self._stream.flush()
            self._last = time.monotonic()


class Notes:
    """What is left out, for the end of the stream: the first MAX_LEFT_OUT, then that there is more."""

    def __init__(self) -> None:
        self.count = 0
        self.frames: list[bytes] = []

    def left_out(self, name: str, reason: str, *, counts: bool = True) -> None:
        self.count += 1
        if self.count <= files.MAX_LEFT_OUT:
            self.frames.append(files.encode_left_out(LeftOut(name, reason[:MAX_REASON], counts)))
        elif self.count == files.MAX_LEFT_OUT + 1:
            self.frames.append(files.encode_left_out(LeftOut("", "more files", counts=True)))


class Packer:
    """Sends what is at or below the paths `roots` of a folder."""

    def __init__(
        self, out: Output, folder: str, roots: list[str], notes: Notes, request: PackRequest
    ) -> None:
        self._out, self._folder, self._roots, self._notes = out, folder, roots, notes
        self._of_job = bool(request.job)
        self._request = request
        self._have = {one.path: (number, one) for number, one in enumerate(request.have)}

    def send(self) -> None:
        found: list[Found] = []
        same: list[int] = []
        total = size = 0
        for one in self._new(self._request.selection) if self._request.selection else self._below():
            name, info = one.name, one.info
            self._out.working(looked=1)
            if len(found) + len(same) >= files.MAX_ENTRIES:
                roots = ", ".join(map(on_one_line, self._roots))
                raise SystemExit(
                    f"there are more than {files.MAX_ENTRIES:,} files below {roots}; "
                    "name fewer: `cloudddp pull PATH`"
                )
            if stat.S_ISREG(info.st_mode):
                if self._is_same(name, info, info.st_size):
                    same.append(self._have[name][0])
                    continue
                total += 1
                size += info.st_size
            found.append(one)
        self._out.send(files.encode_same(same))
        self._out.send(files.encode_total(Total(total, size)))
        for one in found:
            self._entry(one)
        for frame in self._notes.frames:
            self._out.send(frame)
        self._out.send(files.frame(files.FINISH))

    def _below(self) -> Iterator[Found]:
        """Yield what is at or below the paths of the request."""
        since = 0 if self._of_job or self._request.all else phases.first_began()
        tree = Tree(self._folder, self._roots, self._notes.left_out, since=since)
        for root in self._roots:
            if os.path.lexists(os.path.join(self._folder, root)):
                yield from tree.below(root)
            else:
                sys.stderr.write(f"missing {on_one_line(root)}\n")

    def _new(self, selection: Selection) -> Iterator[Found]:
        """Yield what jobs have written and was not pulled, up to the limit, and what was written since a job
        began."""
        scan = Scan(
            Path(self._folder),
            (),
            selection.scratch,
            phases.first_began(),
            seconds=math.inf,
            again=phases.began_at(store.job_folder(selection.job)),
            left_out=self._notes.left_out,
            present=selection.present,
        )
        new = []
        for one in scan:
            self._out.working(looked=1)
            new.append(one)
        taken, left = choose(new, selection.limit)
        for name in left:
            self._notes.left_out(name, f"beyond job.pull_mb = {selection.limit >> 20}")
        yield from (one.found for one in taken)

    def _is_same(self, name: str, info: os.stat_result, size: int) -> bool:
        """Return whether the laptop has a file, by its size and time."""
        known = self._have.get(name)
        return (
            known is not None
            and not known[1].digest
            and (known[1].size, known[1].mtime_ns) == (size, info.st_mtime_ns)
        )

    def _entry(self, one: Found) -> None:
        try:
            self._send_entry(one)
        except FileNotFoundError:
            pass  # it has gone
        except OSError as error:
            self._notes.left_out(one.name, error.strerror or "cannot be read")

    def _send_entry(self, one: Found) -> None:
        mode, mtime_ns = stat.S_IMODE(one.info.st_mode), one.info.st_mtime_ns
        if stat.S_ISDIR(one.info.st_mode):
            self._out.send(files.encode_entry(Entry(one.name, files.FOLDER, 0, mode, mtime_ns)))
        elif one.target:
            self._out.send(files.encode_entry(Entry(one.name, files.LINK, 0, mode, mtime_ns, one.target)))
        else:
            self._file(one.name, one.path)

    # -- contents ------------------------------------------------------------------------------------------

    def _file(self, name: str, path: str) -> None:
        # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with io.FileIO(os.open(path, flags)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                self._notes.left_out(name, "not a file", counts=False)
                return
            contents = self._contents(name, file, info)
            if contents is not None:
                self._send_contents(name, file, info, contents)

    def _contents(self, name: str, file: io.FileIO, info: os.stat_result) -> Optional[Contents]:
        """Return what is sent of a file. Holes of a job's own files are not sent: a file of 1 TiB may take no
        space on the node's disk."""
        parts = data_of(file.fileno(), info.st_size) if self._of_job else [(0, info.st_size)]
        filled = sum(end - begin for begin, end in parts)
        is_log = os.path.basename(os.path.dirname(name)) == "ranks" and name.endswith(".log")
        if is_log and filled < info.st_size:
            return WithoutHoles(file, info.st_size, parts)
        if info.st_size - filled > max(filled, EMPTY):
            why = f"{info.st_size >> 20} MiB, of which {filled >> 20} MiB were written"
            self._notes.left_out(name, why)
            return None
        file.seek(0)
        return FixedSize(file, info.st_size)

    def _send_contents(self, name: str, file: io.FileIO, info: os.stat_result, contents: Contents) -> None:
        began, (number, have) = time.time_ns(), self._have.get(name, (0, None))
        if self._is_same(name, info, contents.size):  # a log with holes
            self._out.send(files.encode_same([number]))
            return
        hasher, offset = None, 0
        if have is not None and have.digest and have.size <= contents.size:
            hasher = self._beginning(contents, have.size)
            if hasher.hexdigest() == have.digest:
                offset = have.size
            else:
                hasher, contents = None, self._contents(name, file, info) or contents
        mode = stat.S_IMODE(info.st_mode)
        self._out.send(
            files.encode_entry(Entry(name, files.FILE, contents.size, mode, info.st_mtime_ns, "", offset))
        )
        why = self._data(contents, contents.size - offset, hasher)
        state = files.GIVEN_UP if why else _state(info, os.fstat(file.fileno()), began)
        if why:
            self._notes.left_out(name, why)
        self._out.send(files.encode_end(End(state, hasher.digest() if hasher else b"")))

    def _beginning(self, contents: Contents, size: int) -> Any:
        """Return a hasher that has read the first `size` bytes."""
        hasher = hashlib.sha256()
        while size and (piece := contents.read(min(size, BLOCK))):
            hasher.update(piece)
            size -= len(piece)
            self._out.working(hashed=len(piece))
        return hasher

    def _data(self, contents: Contents, size: int, hasher: Any) -> str:
        """Send the next `size` bytes; return why that failed, or ''."""
        while size:
            try:
                piece = contents.read(min(size, BLOCK))
            except OSError as error:
                return error.strerror or "cannot be read"
            if not piece:
                return "it became shorter while it was read"
            if hasher:
                hasher.update(piece)
            self._out.data(piece)
            size -= len(piece)
        return ""


def _state(before: os.stat_result, after: os.stat_result, began: int) -> int:
    """Return the state of a file that was read from the time `began` on (ns)."""
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return files.CHANGED
    return files.SETTLED if began - after.st_mtime_ns > RECENT_NS else files.RECENT


class FixedSize:
    """A file of the size that it had when it was opened."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self.size = size
        self._file = file

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes; none at the end of the file."""
        return self._file.read(count) or b""


Contents = Union[FixedSize, WithoutHoles]
