"""The folder beside the results in which a transfer arrives, and from which complete results are moved to
their place. After a broken transfer it stays, and the next one continues.

Its name is that of the transfer: the same node and job find it again, another node does not. It belongs to
this user alone, and one pull at a time uses it. In it are `files`, what the node has sent or confirmed in
this transfer, and `before`, what had arrived in those that broke.

Each node may have some files of a sharded checkpoint. If it is complete, they become one folder, of hard
links to what was pulled from each node, so that the next pull still finds it there. If not, they go to a
folder of their own, so that nothing loads them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent.protocol.checkpoints import STEP, Checkpoints, Part, is_shard
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.files import Descent, Folder, state_home
from cloudddp.job.results import safe_names
from cloudddp.job.results.safe_names import INCOMPLETE
from cloudddp.job.results.unpack import OTHER_FOLDER_HINT, Notes, Truncated, cannot_write

PREFIX = ".cloudddp-incoming-"


@dataclass(frozen=True, slots=True)
class Incoming:
    files: Folder
    before: Folder


def name_of(*words: str) -> str:
    """Return the name of the folder for a transfer, from what distinguishes it."""
    return PREFIX + hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:16]


@contextlib.contextmanager
def incoming(target: Folder, name: str, *, keeps: bool = True) -> Iterator[Incoming]:
    """Yield the folder of a transfer. What is left in it is removed in the end, unless the transfer broke and
    `keeps`."""
    try:
        folder = _locked(target, name)
    except OSError as error:
        raise cannot_write(target.path, error) from None
    keep = False
    with folder:
        try:
            with folder.enter("files", make=0o700) as files, folder.enter("before", make=0o700) as before:
                _absorb(files, before)
                yield Incoming(files, before)
        except (NodeError, Truncated, KeyboardInterrupt):
            keep = keeps and not _is_empty(folder)
            raise
        except OSError as error:
            raise cannot_write(target.path, error) from None
        finally:
            if not keep:
                shutil.rmtree(name, ignore_errors=True, dir_fd=target.descriptor)


def _locked(target: Folder, name: str) -> Folder:
    """Return the folder, created if it is missing, locked until it is closed. Raises OSError."""
    while True:
        try:
            folder = target.enter(name, make=0o700)
        except NotADirectoryError:
            raise _unusable(target, name, "is not a folder") from None
        try:
            info = os.fstat(folder.descriptor)
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise _unusable(target, name, "can be used by other users")
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(name, dir_fd=target.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            folder.close()  # another pull has completed and removed it meanwhile
            continue
        except OSError as error:
            folder.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CloudDDPError(
                    f"another pull from this node is writing to {target.path}",
                    hint=f"wait until it has ended, or {OTHER_FOLDER_HINT}",
                ) from None
            raise
        except BaseException:
            folder.close()
            raise
        if (here.st_dev, here.st_ino) == folder.identity:
            return folder
        folder.close()


def _unusable(target: Folder, name: str, why: str) -> CloudDDPError:
    return CloudDDPError(
        f"{target.path / name} {why}, so no results are written there",
        hint=f"remove it, or {OTHER_FOLDER_HINT}",
    )


def _absorb(files: Folder, before: Folder) -> None:
    """Move everything from one folder into the other, replacing what has the same path."""
    for name in files.names():
        kind, other = files.kind(name), before.kind(name)
        if kind == other == stat.S_IFDIR:
            with files.enter(name) as inner, before.enter(name) as within:
                _absorb(inner, within)
            os.rmdir(name, dir_fd=files.descriptor)
            continue
        if other == stat.S_IFDIR:
            shutil.rmtree(name, dir_fd=before.descriptor)
        elif other:
            before.remove(name)
        os.rename(name, name, src_dir_fd=files.descriptor, dst_dir_fd=before.descriptor)


def _is_empty(folder: Folder) -> bool:
    """Return whether nothing has arrived; False if that is unknown."""
    with contextlib.suppress(OSError), folder.enter("files") as files, folder.enter("before") as before:
        return not files.names() and not before.names()
    return False


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file or folder; None if it cannot be reached."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


@dataclass
class Move:
    """Moves the contents of a folder into another one and counts the files. `elsewhere`: files of other jobs,
    by path, each with its job and the folder of that job, to which it goes. Shards of an older checkpoint are
    removed where one of `complete` comes: what the node has of it, by folder.
    """

    notes: Notes
    complete: Mapping[str, Part] = field(default_factory=dict)
    incomplete: Sequence[str] = ()  # folders that were moved to INCOMPLETE
    files: int = 0
    size: int = 0
    elsewhere: Mapping[str, tuple[str, Folder]] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)  # files that went elsewhere, by job
    unchanged: int = 0  # links that the target has already
    _state: tuple[int, int] | None = field(default_factory=lambda: identity_of(state_home()))

    def contents(self, source: Folder, target: Folder, at: tuple[str, ...] = ()) -> None:
        """Move everything in `source`, with the path `at` in the results. Raises OSError, and CloudDDPError
        where a folder and a file conflict."""
        for name in source.names():
            info = os.stat(name, dir_fd=source.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._folder(source, target, (*at, name), stat.S_IMODE(info.st_mode))
                continue
            if stat.S_ISLNK(info.st_mode) and _same_link(source, target, name):
                self.unchanged += 1
                continue
            job, other = self.elsewhere.get("/".join((*at, name)), ("", None))
            with _place(other, target, at) as place:
                try:
                    os.rename(name, name, src_dir_fd=source.descriptor, dst_dir_fd=place.descriptor)
                except IsADirectoryError:
                    raise _conflict(place.path / name, "is a folder here and a file in the results") from None
            self.others[job] += other is not None
            self.files += 1
            self.size += info.st_size

    def _folder(self, source: Folder, target: Folder, at: tuple[str, ...], mode: int) -> None:
        name = at[-1]
        try:
            inner = target.enter(name, make=mode)
        except NotADirectoryError:
            raise _conflict(
                target.path / name, "is a link or a file here and a folder in the results"
            ) from None
        with inner:
            if inner.identity == self._state:
                self.notes.left_out(
                    "", f"{inner.path}: it is CLOUDDDP_HOME, which holds cloudddp's own files"
                )
                return
            if (part := self.complete.get("/".join(at))) is not None:
                with _place(dict(self.elsewhere.values()).get(part.job), inner, at) as place:
                    for old in filter(is_shard, place.names()):
                        if old not in part.names and place.kind(old) == stat.S_IFREG:
                            place.remove(old)
            with source.enter(name) as within:
                self.contents(within, inner, at)
        if self.elsewhere:
            with contextlib.suppress(OSError):  # only other jobs may have written there
                os.rmdir(name, dir_fd=target.descriptor)


@contextlib.contextmanager
def _place(other: Folder | None, target: Folder, at: tuple[str, ...]) -> Iterator[Folder]:
    """Yield where the files at the path `at` go: `target`, or that path in `other`."""
    if other is None:
        yield target
        return
    with Descent(other) as descent:
        yield descent.to(at, make=0o755)


def _same_link(source: Folder, target: Folder, name: str) -> bool:
    if target.kind(name) != stat.S_IFLNK:
        return False
    return os.readlink(name, dir_fd=source.descriptor) == os.readlink(name, dir_fd=target.descriptor)


def _conflict(path: Path, why: str) -> CloudDDPError:
    return CloudDDPError(f"{path} {why}: it was not replaced", hint=f"remove it, or {OTHER_FOLDER_HINT}")


def move_results(
    files: Folder,
    target: Folder,
    notes: Notes,
    known: Checkpoints,
    *,
    node: int,
    elsewhere: Mapping[str, tuple[str, Folder]] | None = None,
) -> Move:
    """Move what has arrived from a node to its place, incomplete checkpoints to INCOMPLETE there. `known` are
    those of the nodes that are pulled from; `elsewhere` as in Move. Raises OSError, and CloudDDPError as
    Move.contents."""
    here = {folder: parts[node] for folder, parts in known.parts.items() if node in parts}
    complete = {one: here[one] for one in here if not known.problems[one] and node in known.holders(one)}
    # None: all of them; of a complete one those of an older save.
    aside = {folder: part.older if folder in complete else None for folder, part in here.items()}
    moved = Move(notes, complete, move_incomplete(files, aside), elsewhere=elsewhere or {})
    moved.contents(files, target)
    return moved


def move_incomplete(files: Folder, aside: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Move these files in each folder, or all that belong to a checkpoint (None), into INCOMPLETE; return the
    folders of the latter that have some. Raises OSError."""
    moved = []
    for folder, older in aside.items():
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError)
        with missing, Descent(files) as descent, Descent(files) as other:
            path = safe_names.split(folder or ".")
            source = descent.to(path)
            every = path and STEP.fullmatch(path[-1])
            names = [name for name in source.names() if every or is_shard(name)]
            names = names if older is None else [name for name in names if name in older]
            if names:
                target = other.to((INCOMPLETE, *path), make=0o755)
                for name in names:
                    os.rename(name, name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
                moved += [folder] if older is None else []
                with contextlib.suppress(OSError):  # it has other files, or another folder
                    for depth in range(len(path), 0, -1):
                        os.rmdir(path[depth - 1], dir_fd=descent.to(path[: depth - 1]).descriptor)
    return moved


def move_to_incomplete(results: Path, folder: str) -> None:
    """Move a folder of results that were pulled. Raises OSError."""
    if folder and (results / folder).is_dir():
        place = results / INCOMPLETE / folder
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        (results / folder).rename(place)


def merge_shards(base: Path, folders: Mapping[int, Path], known: Checkpoints) -> list[str]:
    """Link the files of each complete checkpoint of which several of the `folders` (by node) have some
    into one folder below `base`; return the paths of these checkpoints. One of which two nodes have the
    same file is left as it is, and so is one of which a pull has left something out. Raises OSError."""
    merged = []
    for path, parts in sorted(known.parts.items()):
        holders = known.holders(path)
        found = [(node, name) for node in holders for name in parts[node].names]
        is_mergeable = len(holders) > 1 and len({name for _, name in found}) == len(found)
        if known.problems[path] or not is_mergeable or not holders <= folders.keys():
            continue
        if all(os.path.lexists(folders[node] / path / name) for node, name in found):
            for node, name in found:
                if folders[node] != base:
                    _link(folders[node] / path / name, base, (*path.split("/"), *name.split("/")))
            merged.append(path)
    return merged


def _link(source: Path, base: Path, path: Sequence[str]) -> None:
    *folder, last = filter(None, path)
    if stat.S_ISREG(source.lstat().st_mode):
        with Folder.at(base) as root, Descent(root) as descent:
            target = descent.to(folder, make=0o755)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=target.descriptor)
            os.link(source, last, dst_dir_fd=target.descriptor, follow_symlinks=False)
