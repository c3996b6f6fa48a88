"""`pack`: write files and folders of the project, or of a job's own folder, to stdout, as a tar stream.

The stream holds only files, folders and symbolic links, which is all that cloudddp/job/untar.py takes.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Union

from agent import store
from cloudddp.agent.protocol.files import PackRequest

REQUEST = PackRequest
MAX_NOTES = 1000
EMPTY = 1 << 26  # bytes of holes that may be sent as zeros
MAX_PARTS = 10_000  # of a file with holes
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
        packer = Packer(stream, folder, roots, notes, of_job=bool(request.job))
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
    """Adds paths of a project to a tar stream, or `of_job` those of its own folder. `roots` are the paths that were asked for."""

    def __init__(
        self, stream: tarfile.TarFile, folder: Path, roots: list[str], notes: Notes, *, of_job: bool = False
    ) -> None:
        self._stream, self._folder, self._roots, self._notes = stream, folder, roots, notes
        self._of_job = of_job

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
                self._add_file(member, source, is_log=path.parent.name == "ranks" and path.suffix == ".log")

    def _add_file(self, member: tarfile.TarInfo, source: BinaryIO, *, is_log: bool) -> None:
        """Send a file. Holes of a job's own files are not sent: a file of 1 TiB may take no space on the node's disk."""
        parts = data_of(source.fileno(), member.size) if self._of_job else [(0, member.size)]
        filled = sum(end - begin for begin, end in parts)
        source.seek(0)
        if is_log and filled < member.size:
            without_holes = WithoutHoles(source, member.size, parts)
            member.size = without_holes.size
            self._stream.addfile(member, without_holes)  # type: ignore[arg-type]
        elif member.size - filled > max(filled, EMPTY):
            why = f"{member.size >> 20} MiB, of which {filled >> 20} MiB were written"
            self._notes.left_out(member.name, why)
        else:
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


def data_of(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return where a file has data, up to `size`: begin and end of each part between two holes. Of a file with very many
    holes the rest counts as data."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < size and len(found) < MAX_PARTS:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        except OSError:  # no data until the end
            return found
        if begin < size:
            found.append((begin, at))
    return found if at >= size else [*found, (at, size)]


class WithoutHoles:
    """A log without the part that rank_log.py has removed, which would be sent as zeros: a line says how long it was."""

    def __init__(self, file: BinaryIO, size: int, parts: list[tuple[int, int]]) -> None:
        self._file = file
        self._pieces: list[Union[bytes, tuple[int, int]]] = []
        last = 0
        for begin, end in [*parts, (size, size)]:
            if begin > last:
                self._pieces.append(
                    b"\n[cloudddp: %d bytes of this log were dropped here]\n" % (begin - last)
                )
            if end > begin:
                self._pieces.append((begin, end))
            last = end
        self.size = sum(len(one) if isinstance(one, bytes) else one[1] - one[0] for one in self._pieces)

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end: tarfile takes less for the end of the file."""
        found = bytearray()
        while self._pieces and len(found) < count:
            found += self._next(count - len(found))
        return bytes(found)

    def _next(self, count: int) -> bytes:
        piece = self._pieces.pop(0)
        if isinstance(piece, bytes):
            data, rest = piece[:count], piece[count:]
            self._pieces[:0] = [rest] if rest else []
            return data
        begin, end = piece
        wanted = min(count, end - begin)
        data = os.pread(self._file.fileno(), wanted, begin) or bytes(wanted)  # it has become shorter
        begin += len(data)
        self._pieces[:0] = [(begin, end)] if begin < end else []
        return data


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
