"""`pack`: write files and folders of the project, or of a job's own folder, to stdout, as a tar stream.

The stream holds only files, folders and symbolic links, which is all that cloudddp/job/untar.py takes.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from agent import store
from cloudddp.agent.protocol.files import PackRequest

REQUEST = PackRequest
MAX_NOTES = 1000
REPOSITORY = ".git"  # the laptop would not take it


def step(request: PackRequest) -> None:
    """What cannot be sent (a pipe, a socket, a link to what was not requested, a file that is gone or unreadable) is
    named on stderr and left out; the other files are still sent."""
    folder = store.job_folder(request.job) if request.job else store.project_folder(request.project)
    roots = [os.path.normpath(name) for name in request.paths]
    notes = Notes()
    with tarfile.open(
        fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8",
        errors="surrogateescape",
    ) as stream:  # fmt: skip
        packer = Packer(stream, folder, roots, notes)
        for root in roots:
            if os.path.lexists(folder / root):
                for path in below(folder / root, folder, notes):
                    packer.add(path)
            else:
                sys.stderr.write(f"missing {on_one_line(root)}\n")
    notes.close()


class Notes:
    """What is left out, one line each on stderr: the first MAX_NOTES, then how many more there are."""

    def __init__(self) -> None:
        self.count = 0

    def left_out(self, name: str, reason: str) -> None:
        self.count += 1
        if self.count <= MAX_NOTES:
            sys.stderr.write(f"left out {on_one_line(name)}: {on_one_line(reason)}\n")

    def close(self) -> None:
        if self.count > MAX_NOTES:
            sys.stderr.write(f"left out {self.count - MAX_NOTES} more\n")


def on_one_line(text: str) -> str:
    """Return a name with line breaks, control characters and bytes that are not UTF-8 escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def below(path: Path, folder: Path, notes: Notes) -> Iterator[Path]:
    """Yield a path and, if it is a folder, everything below it except `.git` folders."""
    yield path
    if not path.is_dir() or path.is_symlink():
        return

    def unreadable(error: OSError) -> None:
        notes.left_out(os.path.relpath(str(error.filename), str(folder)), error.strerror or "cannot be read")

    for root, folders, names in os.walk(str(path), onerror=unreadable):
        if REPOSITORY in folders:
            folders.remove(REPOSITORY)
            notes.left_out(
                os.path.relpath(os.path.join(root, REPOSITORY), str(folder)), "the folder of a repository"
            )
        yield from (Path(root) / name for name in sorted(folders + names))


class Packer:
    """Adds paths of a project to a tar stream. `roots` are the paths that were asked for."""

    def __init__(self, stream: tarfile.TarFile, folder: Path, roots: list[str], notes: Notes) -> None:
        self._stream, self._folder, self._roots, self._notes = stream, folder, roots, notes

    def add(self, path: Path) -> None:
        name = os.path.normpath(str(path.relative_to(self._folder)))
        try:
            self._add(path, name)
        except OSError as error:
            self._notes.left_out(name, error.strerror or "cannot be read")

    def _add(self, path: Path, name: str) -> None:
        self._stream.inodes = {}  # type: ignore[attr-defined]  # hard links are sent as separate files
        member = self._stream.gettarinfo(str(path), arcname=name)
        if member is None or not (member.isreg() or member.isdir() or member.issym()):
            self._notes.left_out(name, "not a file")
        elif member.issym():
            self._add_link(member, path)
        elif member.isdir():
            self._stream.addfile(member)
        else:
            # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as source:
                self._stream.addfile(member, FixedSize(source, member.size))  # type: ignore[arg-type]

    def _add_link(self, member: tarfile.TarInfo, path: Path) -> None:
        """Send a link to something that was requested. An absolute one into the project becomes relative."""
        target = member.linkname
        if os.path.isabs(target) and str(self._folder) in (target, *map(str, Path(target).parents)):
            member.linkname = os.path.relpath(target, str(path.parent))
        if link_leads_to(member.name, member.linkname, self._roots):
            self._stream.addfile(member)
        else:
            self._notes.left_out(member.name, f"a link to {target}")


def link_leads_to(name: str, target: str, roots: list[str]) -> bool:
    """Return whether a link ends at or below one of `roots`, by its text: as link_end in cloudddp/job/safe_names.py."""
    words = [word for word in target.split("/") if word not in ("", ".")]
    up = 0
    while up < len(words) and words[up] == "..":
        up += 1
    above = name.split("/")[:-1]
    if not target or target.startswith("/") or ".." in words[up:] or up > len(above):
        return False
    end = "/".join([*above[: len(above) - up], *words[up:]])
    return any(root == "." or end == root or end.startswith(root + "/") for root in roots)


class FixedSize:
    """A file of the size that was announced, whatever happens to it while it is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size

    def read(self, count: int) -> bytes:
        data = self.file.read(min(count, self.left))
        if not data and self.left:
            data = b"\0" * min(count, self.left)
        self.left -= len(data)
        return data
