"""Walks results in the project: one walk for what is listed, what goes to the laptop and what is copied to
S3.

A symbolic link is kept where it leads to something that is walked anyway. One that leads elsewhere on the
node (a scratch disk) is followed, as by `rsync -L`. Below it, only files that a job wrote count, so that a
link to a data set does not bring the data set; `since` 0 brings all. The walk has limits, and what lies
beyond them is left out.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional, Protocol

from agent.node import store
from cloudddp.agent.protocol.manifest import link_end

REPOSITORY = ".git"  # the laptop would not take it
MAX_LINKS = 8  # that are followed inside one another
MAX_FOLLOWED = 1 << 37  # bytes of files behind links
MAX_OLD = 1_000_000  # files behind a link that no job wrote, after which it is given up
DEVICES = ("/proc", "/sys", "/dev")
MEMORY = "/dev/shm"  # ordinary files  # noqa: S108


class OnSkipped(Protocol):
    """Takes the path of what is left out, and why: '' where it does not exist. `counts`: a result may be
    missing because of it."""

    def __call__(self, name: str, reason: str, *, counts: bool = True) -> None: ...


class Found(NamedTuple):
    """A file, folder or link: `name` is its path in the project, `path` where it is read, `target` that of a
    link."""

    name: str
    path: str
    info: os.stat_result
    target: str = ""


@dataclass
class _Base:
    """The project, or a folder to which a link has led. Links that lead to or below `roots` are kept."""

    name: str
    real: str
    roots: Sequence[str]
    folders: tuple[str, ...] = ()  # of the links that were followed
    old: int = 0


class Tree:
    """A walk of the paths `roots` in a folder. `since`: ctime (ns) of the oldest file behind a link that
    counts."""

    def __init__(
        self,
        folder: str,
        roots: Sequence[str],
        left_out: OnSkipped,
        *,
        since: int = 0,
        skip: Optional[Callable[[str], bool]] = None,
    ) -> None:
        self._folder, self._real = folder, os.path.realpath(folder)
        self._left_out, self._since, self._skip = left_out, since, skip
        self._project = _Base("", folder, roots)
        self._waiting: list[tuple[str, str, os.stat_result, _Base]] = []
        self._behind: list[_Base] = []  # the links that were followed
        self._followed = 0

    def below(self, root: str) -> Iterator[Found]:
        """Yield a path and, if it is a folder, everything below it but `.git`. Raises OSError if it does not
        exist."""
        self._behind = []
        path = os.path.join(self._folder, root)
        yield from self._entry(root, path, os.lstat(path), self._project)
        while self._waiting:
            name, path, info, base = self._waiting.pop()
            prefix = "" if name == "." else name + "/"
            try:
                with os.scandir(path) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # else it has gone
                    self._left_out(
                        name, error.strerror or "cannot be read", counts=info.st_ctime_ns >= self._since
                    )
                continue
            last, unreadable = len(self._waiting), ""
            for entry in entries:
                if base.old > MAX_OLD:
                    break
                if self._skip is not None and self._skip(prefix + entry.name):
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno != errno.ENOENT:  # else it has gone
                        unreadable = error.strerror or "cannot be read"
                    continue
                yield from self._entry(prefix + entry.name, f"{path}/{entry.name}", info, base)
            self._waiting[last:] = reversed(self._waiting[last:])
            if unreadable:  # the folder may be listed and not searched, or its entries have too long a path
                self._left_out(name, unreadable)
        for base in self._behind:
            if base.old:
                what = "1 file below it is" if base.old == 1 else f"{base.old:,} files below it are"
                given_up = base.old > MAX_OLD
                more = ", and not all were checked; job.scratch leaves the link out" if given_up else ""
                why = f"a link to {base.real}: {what} older than the first job{more}"
                self._left_out(base.name, why, counts=given_up)

    def _entry(self, name: str, path: str, info: os.stat_result, base: _Base) -> Iterator[Found]:
        if stat.S_ISLNK(info.st_mode):
            yield from self._link(name, path, info, base)
        elif stat.S_ISDIR(info.st_mode):
            if os.path.basename(name) == REPOSITORY:
                self._left_out(name, "the folder of a repository", counts=False)
                return
            self._waiting.append((name, path, info, base))
            if not (base.folders and self._since):  # behind a link only those of new files
                yield Found(name, path, info)
        elif not stat.S_ISREG(info.st_mode):
            self._left_out(name, "not a file", counts=False)
        elif not base.folders:
            yield Found(name, path, info)
        elif info.st_ctime_ns < self._since:
            base.old += 1
        elif self._followed + info.st_size > MAX_FOLLOWED:
            self._left_out(name, f"more than {MAX_FOLLOWED >> 30} GiB lie behind links")
        else:
            self._followed += info.st_size
            yield Found(name, path, info)

    def _link(self, name: str, path: str, info: os.stat_result, base: _Base) -> Iterator[Found]:
        """Keep a link to something that is walked anyway (an absolute one becomes relative), or follow it."""
        try:
            target = text = os.readlink(path)
            if os.path.isabs(target) and _is_within(target, base.real):
                target = os.path.relpath(target, os.path.dirname(path))
            if leads_to(name, target, base.roots):
                yield Found(name, path, info, target)
                return
            there = os.stat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                self._left_out(name, f"a link to {text}, which does not exist", counts=False)
            else:
                self._left_out(name, f"a link to {text}: {error.strerror}")
            return
        real, folders = os.path.realpath(path), (*base.folders, os.path.realpath(os.path.dirname(path)))
        if any(_is_within(real, one) for one in DEVICES) and not _is_within(real, MEMORY):
            self._left_out(name, f"a link to {text}, not a file", counts=False)
        elif any(_is_within(one, real) for one in (self._real, *folders)):
            self._left_out(name, f"a link to {text}, a folder that contains the link", counts=False)
        elif _is_within(real, os.path.realpath(store.ROOT)):
            self._left_out(name, f"a link to {text}, which are cloudddp's own files", counts=False)
        elif len(folders) > MAX_LINKS:
            self._left_out(name, f"a link to {text} behind {MAX_LINKS} others")
        else:
            behind = _Base(name, real, [name], folders)
            self._behind.append(behind)
            yield from self._entry(name, real, there, behind)


def _is_within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder + "/")


def leads_to(name: str, target: str, roots: Sequence[str]) -> bool:
    """Return whether a link ends at or below one of `roots`, by its text."""
    end = link_end(tuple(name.split("/")), target)
    return end is not None and any(root == "." or _is_within("/".join(end), root) for root in roots)
