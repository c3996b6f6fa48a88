"""Files of this computer: cloudddp's state folder, private to its user, and the files that cloudddp ships but
does not import (`infra/` for nodes, and the examples for users). Independent of clusters and nodes.

Every system call that takes a path resolves it again, and follows links that another user may have created in
the meantime. Here a folder is opened once, by descriptor and one path component at a time, without following
links, and its entries are named relative to it (openat). So no link redirects a write.

In a wheel the shipped files are below `cloudddp/_payload/`, in a checkout beside the package. Examples are
found by patterns: nothing here depends on the names of their modules.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import platformdirs

from cloudddp.errors import UsageError

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PRIVATE = 0o700
_ANOTHER = "set CLOUDDDP_HOME to a folder of your own"
_WRITABLE_BY_OTHERS = 0o022  # by the group or by all users


def resolved(path: Path | str) -> Path:
    """Return the path with symbolic links resolved, as far as it exists.

    A loop of links is left for the call that opens it; Path.resolve would raise RuntimeError.
    """
    return Path(os.path.realpath(path))


class Folder:
    """An open folder. `path` is its path when it was opened, and is used in messages only."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Open a folder by its path, following symbolic links. Raises OSError."""
        return cls(os.open(path, _OPEN_FOLDER), path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: the same for every path that leads to this folder."""
        info = os.fstat(self.descriptor)
        return info.st_dev, info.st_ino

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Put the full path of `name`, which must be one path component, into errors of the block."""
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"not a name in a folder: {name!r}")
        try:
            yield
        except OSError as error:
            error.filename = str(self.path / name)
            raise

    def enter(self, name: str, *, make: int | None = None) -> Folder:
        """Open a folder in this one; with `make`, create it with that mode if it is missing.

        Raises OSError: NotADirectoryError for a file, and for a symbolic link, whatever its target.
        """
        with self._naming(name):
            if make is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, make, dir_fd=self.descriptor)
            try:
                descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK):  # a link; the code differs between systems
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                raise
        return Folder(descriptor, self.path / name)

    def names(self) -> list[str]:
        with os.scandir(self.descriptor) as entries:
            return sorted(entry.name for entry in entries)

    def kind(self, name: str) -> int:
        """Return the file type of an entry (stat.S_IFREG, S_IFLNK, ...), or 0 if it does not exist."""
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return 0

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor of a new file, for writing. Raises FileExistsError if the name is taken."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._naming(name):
            return os.open(name, flags, mode, dir_fd=self.descriptor)

    def append(self, name: str) -> int:
        """Return a descriptor that appends to a regular file of this user, created if it is missing.

        Raises UsageError if the name is a symbolic link, another user's file, or not a regular file.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self._naming(name):
                descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
                raise self._not_ours(name) from None
            raise
        info = os.fstat(descriptor)
        # With a second hard link, another user could choose the file that is written to.
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            os.close(descriptor)
            raise self._not_ours(name)
        os.fchmod(descriptor, 0o600)
        return descriptor

    def _not_ours(self, name: str) -> UsageError:
        return UsageError(
            f"{self.path / name} is not a regular file owned by you; nothing was written to it",
            hint="look at it with `ls -l`, and remove it",
        )

    def replace(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Replace a file atomically and durably; a symbolic link of that name is replaced, not followed."""
        temporary = f".{name}.{secrets.token_hex(4)}.tmp"
        with self._naming(name):
            descriptor = self.create(temporary, mode)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    os.fchmod(file.fileno(), mode)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self.descriptor)
                raise
            os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file if it exists; of a symbolic link, the link itself."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def read(self, name: str) -> bytes:
        """Return a file's contents. Raises OSError, also for a symbolic link and for what is not a file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would wait for a writer
        with self._naming(name):
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a file", str(self.path / name))
            return file.read()


def open_private(root: Path, *names: str, make: bool = True) -> Folder:
    """Open a folder below `root`, private to this user from `root` on. With `make`, missing folders are
    created.

    Modes become 0700 whatever the umask was. Raises UsageError if one of them is a symbolic link or belongs
    to another user, or if others can write to `root` and may have put anything there; OSError.
    """
    if make and not root.exists() and not root.is_symlink():
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(_PRIVATE)
    check_private(root)
    folder = Folder.at(root)
    try:
        _tighten(folder)
        for name in names:
            try:
                inner = folder.enter(name, make=_PRIVATE if make else None)
            except NotADirectoryError:
                raise _bad(folder.path / name, "is not a folder", "remove it") from None
            folder.close()
            folder = inner
            _tighten(folder)
    except BaseException:
        folder.close()
        raise
    return folder


def check_private(root: Path) -> None:
    """Raise UsageError if a private folder exists and other users could have written to it. Changes
    nothing."""
    try:
        link, info = root.lstat(), root.stat()
    except OSError:  # does not exist yet; or cannot be reached, which the first use reports
        return
    if not stat.S_ISDIR(info.st_mode):
        raise _bad(root, "is not a folder", _ANOTHER)
    if info.st_uid != os.geteuid() or link.st_uid not in (info.st_uid, 0):
        raise _bad(root, "belongs to another user", _ANOTHER)
    if info.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        why = f"can be written by other users (mode {mode:04o})"
        raise _bad(root, why, f"if nobody else has put anything there: chmod 700 {root}; or {_ANOTHER}")


def _tighten(folder: Folder) -> None:
    info = os.fstat(folder.descriptor)
    if info.st_uid != os.geteuid():
        raise _bad(folder.path, "belongs to another user", f"remove it, or {_ANOTHER}")
    if stat.S_IMODE(info.st_mode) != _PRIVATE:
        os.fchmod(folder.descriptor, _PRIVATE)


def _bad(path: Path, why: str, hint: str) -> UsageError:
    return UsageError(f"{path} {why}, so cloudddp does not use it", hint=hint)


def state_home() -> Path:
    """Return the state folder: CLOUDDDP_HOME if set, else the platform's state folder of the user."""
    if chosen := os.environ.get("CLOUDDDP_HOME"):
        return Path(chosen).absolute()
    if (found := _own_folder(platformdirs.user_state_dir)) is not None:
        return found
    raise UsageError("there is no home folder for cloudddp's state", hint="set HOME, or CLOUDDDP_HOME")


def user_config() -> Path | None:
    """Return the path of the user's configuration file, which may not exist; None without a home folder."""
    folder = _own_folder(platformdirs.user_config_dir)
    return folder and folder / "config.toml"


def _own_folder(find: Callable[[str], str]) -> Path | None:
    """Return a folder of platformdirs. Without a home folder (no HOME, no account with that uid) that raises,
    or returns a relative path."""
    with contextlib.suppress(RuntimeError):
        if (found := Path(find("cloudddp"))).is_absolute():
            return found
    return None


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    Its folder becomes private, and no symbolic link inside the state folder is followed. Raises UsageError,
    OSError.
    """
    root = state_home() if path.is_relative_to(state_home()) else path.parent
    with open_private(root, *path.parent.relative_to(root).parts) as folder:
        folder.replace(path.name, data.encode() if isinstance(data, str) else data)


def project_id(root: Path) -> str:
    """Return the random id of a project folder on this computer; nodes remember whose files they have."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
    path = state_home() / "projects" / name
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{32}", found := path.read_text("ascii")):
            return found
    write_atomic(path, new := secrets.token_hex(16))
    return new


# Per example: the folders whose content becomes the project, and the files below them, by pattern.
_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "classic": [("examples/classic", "**/*")],
    "exact": [("examples/ddp", "**/*")],
    "trainer": [
        ("examples/trainer", "**/*"),
        ("", "train/**/*"),
        *(("", f"docs/{name}.md") for name in ("training", "trainer", "pipelines", "smddp")),
    ],
}
EXAMPLES = tuple(_EXAMPLES)
# What running an example leaves in a checkout.
_NOT_COPIED = ("__pycache__", "runs", "results", ".*")


def payload_root() -> Path:
    """Return the folder that contains `infra/`, `train/` and `examples/`."""
    packaged = Path(__file__).parent / "_payload"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent


def payload_text(name: str) -> str:
    """Return the text of one shipped file, named as in the repository: `infra/node/host-key.sh`."""
    return (payload_root() / name).read_text()


def payload_example(name: str) -> dict[str, Path]:
    """Return the files of an example, by their paths in the project that is made from it."""
    found: dict[str, Path] = {}
    for folder, pattern in _EXAMPLES[name]:
        base = payload_root() / folder
        for path in sorted(base.glob(pattern)):
            parts = path.relative_to(base).parts
            if path.is_file() and not any(fnmatch(part, one) for part in parts for one in _NOT_COPIED):
                found["/".join(parts)] = path
    return found
