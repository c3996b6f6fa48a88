"""Files of a pull: which of them are wanted, by what is here already, and where they go. A file is the same
as the node's if its size and time are; a time of a whole second does not identify the contents, because
programs set such times (tar, cp), so the node compares their hash. One that begins as the node's is
continued. What no agent sends is refused; what this computer cannot hold, or should not get, is left out."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cloudddp.agent.protocol.checkpoints import Checkpoints, Part, folder_of, is_shard
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import LINK, Entry
from cloudddp.agent.protocol.results import SkippedFile
from cloudddp.agent.protocol.transfer import MAX_KNOWN, NOTHING, FileHead, PartialFile
from cloudddp.agent.protocol.writing import FileWriter, Incoming, begun_name, known_of
from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder, state_home
from cloudddp.job.results import safe_names
from cloudddp.job.results.incoming import identity_of, target_folder
from cloudddp.job.results.notes import FREE_SPACE_HINT, LONGEST_NOTE, OTHER_FOLDER_HINT, Notes
from cloudddp.job.results.safe_names import INCOMPLETE, Parts
from cloudddp.text import one_line

MIB = 1 << 20
_TAKEN = "another entry of these results has the same path"
# Errors that concern one name, which the file system forbids.
_OF_ONE_FILE = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_LATEST = 1 << 33  # seconds since the epoch: the year 2242


class _Left(Exception):
    """A file is left out; the text says why."""


class _Writer(FileWriter):
    """Gives what is in the folder `arrived` its place in the `target`."""

    def __init__(self, target: Folder, arrived: Folder, placed: set[tuple[int, int]]) -> None:
        """`placed`: files that must not be replaced, by device and inode."""
        super().__init__(target.descriptor, arrived.descriptor)
        self.target, self._home, self._placed = target, identity_of(state_home()), placed

    def put(self, path: str, item: _Item) -> int:
        """Place a file or link; return its size. Raises _Left."""
        if item.entry.kind == LINK:
            self.link(path, item.entry.target, _local_time(item.entry.mtime_ns))
        else:
            self._place_at(path, begun_name(item.path))
        parent, base = self.place(path)
        info = os.stat(base, dir_fd=parent, follow_symlinks=False)
        self._placed.add(_identity(info))
        return info.st_size

    def make_folder(self, path: str, mode: int) -> None:
        parent, base = self.place(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(base, 0o700 | (mode & 0o755), dir_fd=parent)
        self.place(f"{path}/")  # it is a folder

    def prune(self, part: Part) -> None:
        """Remove shards of an older save than that of a complete checkpoint that comes."""
        folder = Folder(self.place(f"{part.folder}/x".lstrip("/"))[0], Path(part.folder))
        for name in filter(is_shard, folder.names()):
            if name not in part.names and folder.kind(name) == stat.S_IFREG:
                folder.remove(name)

    def make_way(self, parent: int, base: str, path: str, _head: FileHead | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(base, dir_fd=parent, follow_symlinks=False)
            if _identity(info) in self._placed:  # this computer takes both names for the same
                raise _Left(_TAKEN)
            if stat.S_ISDIR(info.st_mode):
                raise self._conflict(path, "is a folder here and a file in the results")

    def _enter(self, parent: int, base: str, path: str) -> int:
        if Folder(parent, Path(path)).kind(base) not in (0, stat.S_IFDIR):
            raise self._conflict(path, "is a link or a file here and a folder in the results")
        inner = super()._enter(parent, base, path)
        if Folder(inner, Path(path)).identity == self._home:
            os.close(inner)
            raise _Left(f"{self.target.path / path} is CLOUDDDP_HOME, which holds cloudddp's own files")
        return inner

    def _conflict(self, path: str, why: str) -> _Left:
        return _Left(f"{self.target.path / path} {why}; remove it, or {OTHER_FOLDER_HINT}")


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull. `notes` list what was missing or left out, and why. `unchanged` files are in the
    target already and not counted in `files`. `left` are results that were not copied; None: there are more
    than a node remembers. `incomplete`: folders of checkpoints, which are in safe_names.INCOMPLETE. `others`:
    how many of the files other jobs wrote, by job. `missing`: paths that were requested and do not exist."""

    files: int
    size: int
    notes: tuple[str, ...]
    unchanged: int = 0
    left: tuple[SkippedFile, ...] | None = ()
    incomplete: tuple[str, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()

    @property
    def found(self) -> int:
        """The number of files, with those that are unchanged."""
        return self.files + self.unchanged

    @property
    def is_empty(self) -> bool:
        return not self.found and self.left == ()


class _Item(NamedTuple):
    """A file or link that gets its place in the end, in the folder of the job that wrote it."""

    path: str
    job: str
    entry: Entry


class Placing:
    """A Target of protocol/receiving.py, for files below the `roots`. `wanted`: by index, what is not here;
    `known`: of these, what is here of them. `places`: the folders of other jobs, whose files go there."""

    def __init__(
        self,
        arrived: Folder,
        target: Folder,
        roots: Sequence[Parts],
        notes: Notes,
        node: int,
        places: Mapping[str, Path] | None = None,
    ) -> None:
        self.wanted: dict[int, _Item] = {}
        self.known: dict[int, PartialFile] = {}
        self._in_target: set[int] = set()  # of the known ones: the others have arrived before
        self._newer: set[int] = set()  # files that are newer here
        self._folders: dict[str, int] = {}  # path -> mode
        self._items: dict[str, _Item | None] = {}  # by path; None: unchanged
        self._placed: set[tuple[int, int]] = set()
        self._arrived, self._opened = arrived, contextlib.ExitStack()
        self._writers = {"": _Writer(target, arrived, self._placed)}  # by job
        self._opened.callback(self._writers[""].close)
        self._before = frozenset(arrived.names())  # what had arrived in transfers that broke
        self._allowed = os.fstat(arrived.descriptor).st_mode
        self._target, self._roots, self.notes, self.node = target, roots, notes, node
        self.places = places or {}

    def close(self) -> None:
        self._opened.close()

    def _writer(self, job: str) -> _Writer:
        if job not in self._writers:
            place = self._opened.enter_context(target_folder(self.places[job]))
            self._writers[job] = _Writer(place, self._arrived, self._placed)
            self._opened.callback(self._writers[job].close)
        return self._writers[job]

    # -- what there is ---------------------------------------------------------------------------------------

    def accepts(self, path: str, link: str | None = None) -> bool:
        """Return whether a path may be written, and note why not. Raises ProtocolError for what no agent
        sends."""
        parts = safe_names.checked(path, self._roots, link)
        guarded = next((at for at, part in enumerate(parts, 1) if safe_names.guarded(part)), None)
        if guarded is not None:
            why = "git or cloudddp would act on it, so `pull` never writes it"
            is_result = parts[guarded - 1] != ".git"
            self.notes.left_out("/".join(parts[:guarded]), why, counts=is_result)
        elif safe_names.too_long(parts):
            self.notes.left_out(path, "its path is too long")
        elif path in self._items:
            self.notes.left_out(path, _TAKEN)
        else:
            return True
        return False

    def folder(self, path: str, mode: int) -> None:
        if self.accepts(path):
            self._folders[path] = mode

    def item(self, number: int, path: str, entry: Entry, job: str = "") -> None:
        """Take a link, or what is here of a file, which is wanted otherwise."""
        if not self.accepts(path, entry.target if entry.kind == LINK else None):
            return
        self._items[path] = item = _Item(path, job, entry)
        writer = self._writer(job)
        if entry.kind == LINK:
            with contextlib.suppress(OSError):
                if os.readlink(path, dir_fd=writer.target.descriptor) == entry.target:
                    self._items[path] = None
            return
        known = NOTHING
        if (key := begun_name(path)) in self._before:
            if _is_same(os.stat(key, dir_fd=self._arrived.descriptor, follow_symlinks=False), entry):
                return
            known = writer.known(path) or NOTHING
            if known.size > entry.size:
                self._arrived.remove(key)
                known = NOTHING
        if not known.size:
            with contextlib.suppress(OSError), os.fdopen(writer.present(path), "rb") as here:
                info = os.fstat(here.fileno())
                if _is_same(info, entry):
                    self._items[path] = None
                    self._placed |= {_identity(info)} if info.st_nlink == 1 else set()
                    return
                # Hidden files of this user: not even their hashes go to a node.
                is_hidden = path.startswith(".") or "/." in path
                if is_newer := info.st_mtime_ns > entry.mtime_ns >= 0:  # S3 lists no times (-1)
                    self._newer.add(number)
                may_be_same = (is_newer or not info.st_mtime_ns % 10**9) and entry.mtime_ns >= 0
                if may_be_same and not is_hidden and info.st_size <= entry.size:
                    known = known_of(os.dup(here.fileno()))
                    self._in_target.add(number)
        self.wanted[number] = item
        if known.size and len(self.known) < MAX_KNOWN:
            self.known[number] = known

    def check_space(self) -> int:
        """Return how many bytes have to be sent. Raises CloudDDPError where they do not fit."""
        held = {number: self.known.get(number, NOTHING).size for number in self.wanted}
        sizes = {number: item.entry.size for number, item in self.wanted.items()}
        needed = {  # a file in its place that has the size of the node's is taken for the same
            number: full if number in self._in_target and held[number] < full else full - held[number]
            for number, full in sizes.items()
        }
        size = sum(needed.values())
        disk = os.fstatvfs(self._target.descriptor)
        free = max(disk.f_bavail * disk.f_frsize, MIB)  # of less the writing fails
        if size > free:
            what, largest = "the results are", max(needed, key=needed.__getitem__)
            if needed[largest] > free:
                what, size = f"{one_line(self.wanted[largest].path, LONGEST_NOTE)} is", needed[largest]
            raise CloudDDPError(
                f"node {self.node}: {what} {-(-size // MIB)} MiB, and {free // MIB} MiB are free on this "
                "computer's disk; nothing was kept",
                hint=FREE_SPACE_HINT,
            )
        return sum(sizes.values()) - sum(held.values())

    # -- contents: a Target ----------------------------------------------------------------------------------

    def begin(self, number: int, offset: int) -> Incoming:
        path, job, _ = self.wanted[number]
        if offset not in (0, self.known.get(number, NOTHING).size):
            raise ProtocolError(f"{path!r} continues a file that is not here")
        return self._writer(job).begin(path, offset, in_place=number in self._in_target)

    def finish(self, head: FileHead, incoming: Incoming) -> None:
        item, moment = self.wanted[head.number], _local_time(head.mtime_ns)
        if head.changed:
            self.notes.changed(item.path)
        if head.number in self._newer:
            self.notes.add(f"replaced {item.path}, which was newer on this computer")
        if head.unsettled:  # a whole second does not identify the contents
            moment -= moment % 10**9
        mode = 0o600 | (item.entry.mode & 0o755 & self._allowed)
        self._writer(item.job).complete(head._replace(mtime_ns=moment), incoming, mode)

    def confirm(self, head: FileHead) -> bool:
        number, digest = head.number, head.digest.hex()
        if number not in self._in_target or self.known.get(number) != (head.size, digest):
            return False
        self._items[self.wanted[number].path] = None
        return True

    def gone(self, head: FileHead) -> None:
        path = self.wanted[head.number].path
        self.notes.deleted(path)
        del self._items[path]

    # -- objects of S3 ---------------------------------------------------------------------------------------

    def open(self, number: int) -> BinaryIO:
        """Return an empty file for the contents of one that is wanted."""
        return os.fdopen(self._arrived.create(begun_name(self.wanted[number].path), 0o644), "wb")

    def set_time(self, path: str, mtime_ns: int) -> None:
        times, name = (_local_time(mtime_ns),) * 2, begun_name(path)
        os.utime(name, ns=times, dir_fd=self._arrived.descriptor, follow_symlinks=False)

    def drop(self, path: str) -> None:
        self._items.pop(path)

    # -- their places ----------------------------------------------------------------------------------------

    def move(self, known: Checkpoints) -> Pulled:
        """Move what has arrived to its place, incomplete checkpoints to INCOMPLETE there. `known` are those
        of the nodes that are pulled from. Raises OSError."""
        items = [item for item in self._items.values() if item is not None]
        parts = {folder: of[self.node] for folder, of in known.parts.items() if self.node in of}
        complete = {part for part in parts if not known.problems[part] and self.node in known.holders(part)}
        incomplete, files, size = dict[str, None](), Counter[str](), 0
        own = self._writer("")
        if any(item.job for item in items):  # only other jobs may have files there
            parents = {str(at) for item in items if not item.job for at in Path(item.path).parents}
            self._folders = {path: mode for path, mode in self._folders.items() if path in parents}
        for path, mode in self._folders.items():
            with self._noting(path):
                own.make_folder(path, mode)
        for one in complete.intersection(folder_of(item.path, complete) for item in items):
            with self._noting(one):
                self._writers.get(parts[one].job, own).prune(parts[one])
        for item in items:
            job, to = item.job, item.path
            folder = folder_of(to, parts)
            is_older = folder is not None and to.removeprefix(f"{folder}/") in parts[folder].older
            if folder is not None and (is_older or folder not in complete):
                job, to = "", f"{INCOMPLETE}/{to}"
                incomplete |= {} if folder in complete else {folder: None}
            with self._noting(item.path):
                size += self._writer(job).put(to, item)
                files[job] += 1
        return Pulled(
            files.total(),
            size,
            self.notes.lines,
            len(self._items) - len(items),
            self.notes.left,
            tuple(incomplete),
            {job: count for job, count in files.items() if job},
            frozenset(self.notes.missing),
        )

    @contextlib.contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        try:
            yield
        except _Left as error:
            self.notes.left_out(path, str(error))
        except OSError as error:
            if error.errno not in _OF_ONE_FILE:
                raise
            self.notes.left_out(path, error.strerror or "")


def _is_same(info: os.stat_result, entry: Entry) -> bool:
    """Whether a file is that of the node, by its size and a time that identifies the contents."""
    is_exact = info.st_mtime_ns % 10**9 and info.st_mtime_ns == entry.mtime_ns
    return info.st_size == entry.size and bool(is_exact or not entry.size)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _local_time(mtime_ns: int) -> int:
    """Return a time of a node as it is set here (ns)."""
    return min(max(mtime_ns, 0), _LATEST * 10**9)
