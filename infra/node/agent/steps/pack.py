"""`pack`: send files and folders of the project, or of a job's own folder, to the laptop, as far as it lacks
them (cloudddp/agent/protocol/file_steps.py).
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

from agent.files import records, shared
from agent.files.paths import on_one_line
from agent.files.scan import Scan
from agent.files.selection import choose
from agent.files.tree import Found, Tree
from agent.jobs import phases
from agent.node import store
from agent.ranks import rank_log
from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.file_steps import PackRequest, Selection
from cloudddp.agent.protocol.manifest import FILE, LINK, Entry, path_to_wire
from cloudddp.agent.protocol.sending import Sender, Wanted, time_of
from cloudddp.agent.protocol.transfer import MAX_ENTRIES, UNSEALED, Listing, Wants

REQUEST = PackRequest
EMPTY = 1 << 26  # bytes of holes that may be sent as zeros
QUIET_SECONDS = 5.0  # after which a frame says that the agent works


def step(request: PackRequest) -> None:
    """What cannot be sent (an unreadable file, a pipe) is named in the stream; the other files are still
    sent."""
    output = Output()
    packer = Packer(output, request)
    found = packer.found()
    for listing in listings(found):
        output.send(listing.frame(UNSEALED))
    output.send(transfer.frame(UNSEALED, transfer.DONE))
    wants = _answer()
    if wants is not None:
        packer.send(found, wants)


def _answer() -> Optional[Wants]:
    """Return what the laptop lacks; None if that is nothing, or it has gone."""
    try:
        frame = transfer.read_frame(sys.stdin.buffer.read, UNSEALED)
    except EOFError:
        return None
    return transfer.read_wants(frame) if frame.kind == transfer.WANTS else None


class Output:
    """The stream of frames."""

    def __init__(self) -> None:
        self._stream = sys.stdout.buffer
        self._last = time.monotonic()
        self._left_out = 0

    def send(self, frame: bytes) -> None:
        self._stream.write(frame)
        self._stream.flush()
        self._last = time.monotonic()

    def working(self) -> None:
        """Say that the agent works while there is nothing to send."""
        if time.monotonic() - self._last > QUIET_SECONDS:
            self.send(transfer.frame(UNSEALED, transfer.ALIVE))

    def left_out(self, name: str, reason: str, *, counts: bool = True) -> None:
        """Name what is left out: the first MAX_LEFT_OUT, then that there is more."""
        self._left_out += 1
        if self._left_out <= file_steps.MAX_LEFT_OUT:
            self.send(file_steps.left_out(name, reason[:MAX_REASON], counts=counts))
        elif self._left_out == file_steps.MAX_LEFT_OUT + 1:
            self.send(file_steps.left_out("", "more files"))


class Item(NamedTuple):
    """A file, folder or link that is sent, and its entry in the listing; a folder has none but its mode."""

    found: Found
    entry: Entry
    other: str = ""  # the job that wrote it, '' for the requested one


def listings(items: list[Item]) -> Iterator[Listing]:
    """Yield listings of all items. They are sorted, so that each index is the position of a file or link."""
    folders: dict[str, dict[str, Entry]] = {}
    modes: dict[str, int] = {}
    others: dict[str, list[int]] = {}
    count = names = files = 0
    for found, entry, other in items:
        path = path_to_wire(found.name)
        if stat.S_ISDIR(found.info.st_mode):
            modes[path] = entry.mode
        else:
            folder, _, name = path.rpartition("/")
            folders.setdefault(folder, {})[name] = entry
            if other:
                others.setdefault(other, []).append(files)
            files += 1
        count, names = count + 1, names + len(path) + len(entry.target)
        if count >= file_steps.MAX_LISTED or names > file_steps.MAX_NAMES:
            yield _listing(folders, modes, others)
            folders, modes, others, count, names, files = {}, {}, {}, 0, 0, 0
    if items:
        yield _listing(folders, modes, others)


def _listing(
    folders: dict[str, dict[str, Entry]], modes: dict[str, int], others: dict[str, list[int]]
) -> Listing:
    return Listing(folders, modes=modes, others={job: tuple(one) for job, one in others.items()})


class Packer:
    """Finds and sends what is at or below the paths of a request."""

    def __init__(self, output: Output, request: PackRequest) -> None:
        self._output, self._request = output, request
        self._of_job = bool(request.job)
        self._folder = str(
            store.job_folder(request.job) if request.job else store.project_folder(request.project)
        )
        self._roots = [os.path.normpath(name) for name in request.paths]
        self._attempts = phases.attempts() if request.results_of else []
        project = Path(self._folder)
        self._pulled, self._received = records.pulled(project), records.received(project)

    def found(self) -> list[Item]:
        """Return what there is, in the order of the listing: by folder, the files of one together."""
        items: dict[str, Item] = {}  # by name: of a folder that changes, scandir may yield one twice
        selection = self._request.selection
        for one in self._new(selection) if selection else self._below():
            self._output.working()
            if len(items) >= MAX_ENTRIES:
                roots = ", ".join(map(on_one_line, self._roots))
                raise SystemExit(
                    f"there are more than {MAX_ENTRIES:,} files below {roots}; "
                    "name fewer: `cloudddp pull PATH`"
                )
            other = self._other(one)
            was_pulled = other and self._pulled.is_pulled(one.name, one.info.st_ctime_ns)
            if one.name != "." and not was_pulled and (entry := self._entry(one)) is not None:
                items[one.name] = Item(one, entry, other)
        return sorted(items.values(), key=lambda item: item.found.name.rpartition("/")[::2])

    def _other(self, one: Found) -> str:
        """Return the job that wrote a file, '' for the requested one and where the writer of a copy is not
        known. Files from before all jobs count as of the first."""
        if not self._attempts or stat.S_ISDIR(one.info.st_mode):
            return ""
        copy = self._received.copy(one.name, one.info)
        if copy is not None:
            job = copy.job
        else:
            at = bisect.bisect(self._attempts, (one.info.st_ctime_ns, "~", 0))
            job = self._attempts[max(at - 1, 0)][1]
        return "" if job == self._request.results_of else job

    def send(self, items: list[Item], wants: Wants) -> None:
        """Send the files that are wanted."""
        listed = [item for item in items if not stat.S_ISDIR(item.found.info.st_mode)]
        wanted = [
            Wanted(index, listed[index].found.path, offset, wants.digests.get(str(index), ""))
            for index, offset in wants.of([(item.found.name, item.entry) for item in listed])
        ]

        def hole(one: Wanted, descriptor: int) -> tuple[int, int]:
            return rank_log.hole_of(descriptor) if self._is_log(listed[one.number].found) else (0, 0)

        def lost(one: Wanted, error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # else it has gone
                self._output.left_out(listed[one.number].found.name, error.strerror or "cannot be read")

        sender = Sender(self._folder, UNSEALED, on_lost=lost, hole=hole, tries=1)
        for frame in sender.frames(wanted):
            if frame:
                self._output.send(frame)
            else:
                self._output.working()
        self._output.send(transfer.frame(UNSEALED, transfer.DONE))

    def _below(self) -> Iterator[Found]:
        """Yield what is at or below the paths of the request."""
        since = 0 if self._of_job or self._request.all else phases.first_began()
        own = () if since == 0 else shared.places().elsewhere  # what the user names is sent
        tree = Tree(self._folder, self._roots, self._output.left_out, since=since, skip=own.__contains__)
        for root in self._roots:
            if shared.is_below(root, own):
                continue
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
            left_out=self._output.left_out,
            present=selection.present,
        )
        new = []
        for one in scan:
            self._output.working()
            new.append(one)
        taken, left = choose(new, selection.limit)
        for name in left:
            self._output.left_out(name, f"beyond job.pull_mb = {selection.limit >> 20}")
        yield from (one.found for one in taken)

    def _entry(self, one: Found) -> Optional[Entry]:
        """Return an entry of the listing; None for a file that is left out."""
        info = one.info
        mode, mtime_ns, size = stat.S_IMODE(info.st_mode), time_of(info), info.st_size
        if one.target:
            return Entry(LINK, mode, 0, mtime_ns, path_to_wire(one.target))
        filled = info.st_blocks * 512
        if self._of_job and stat.S_ISREG(info.st_mode) and filled < size:  # it has holes
            size -= self._dropped(one)
            if size - filled > max(filled, EMPTY):  # 1 TiB may take no space on the node's disk
                why = f"{size >> 20} MiB, of which {filled >> 20} MiB were written"
                self._output.left_out(one.name, why)
                return None
        return Entry(FILE, mode, size, mtime_ns, "")

    def _is_log(self, one: Found) -> bool:
        """Whether a file is the log of a rank, whose middle may have been dropped."""
        folder, name = os.path.split(one.name)
        return self._of_job and os.path.basename(folder) == "ranks" and name.endswith(".log")

    def _dropped(self, one: Found) -> int:
        """Return how many bytes of a file are not sent: those of the hole in a log."""
        with contextlib.suppress(OSError):
            if self._is_log(one):
                with store.open_regular(Path(one.path)) as file:
                    begin, end = rank_log.hole_of(file.fileno())
                    return end - begin
        return 0
