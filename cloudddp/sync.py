"""Which files go to the nodes, what changed, and the stream that carries it.

The list is git's own where the project is a repository (tracked and untracked, not ignored), else a walk with
the rules of the .gitignore files found on the way. A manifest says path, kind, mode, size and time; only what
differs from the node's manifest is sent, as one tar stream, and what is gone here is deleted there. Files that a
job wrote on the node are in no manifest and are never touched. This room knows files, not SSH or AWS.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.spec import number

# path -> [kind, mode, size, mtime_ns, link target]; kind "f" or "l". The agent makes and reads the same.
Manifest = dict[str, list[str | int]]

ALWAYS_LEFT_OUT = (
    ".git",
    "__pycache__/",
    ".venv/",
    "venv/",
    ".cloudddp/",
    ".cloudddp-incoming-*/",
    ".DS_Store",
)
PIECE = 128 * 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The project as it is here and now."""

    root: Path
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(entry[2]) for entry in self.manifest.values())

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """What a node lacks: paths to send, paths to delete, and how many bytes that is."""

    send: tuple[str, ...]
    delete: tuple[str, ...]
    size: int

    @property
    def nothing(self) -> bool:
        return not self.send and not self.delete


def snapshot(root: Path, *, exclude: Sequence[str] = (), keep_out: Sequence[str] = ()) -> Snapshot:
    """Return the files of a project. `exclude` are .gitignore patterns, `keep_out` exact paths (job outputs).

    Raises UsageError for what cannot be carried: a socket, a pipe, a device, an unreadable file.
    """
    left_out = _matcher((*ALWAYS_LEFT_OUT, *exclude))
    outputs = [posixpath.normpath(out) for out in keep_out]  # "./runs/" is "runs"
    manifest: Manifest = {}
    for name in sorted(_list(root)):
        if left_out(name) or any(name == out or name.startswith(out + "/") for out in outputs):
            continue
        entry = _describe(root, name)
        if entry is not None:
            manifest[name] = entry
    return Snapshot(root, manifest)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    return spec.match_file


def _list(root: Path) -> Iterator[str]:
    if _in_repository(root):
        yield from _git_list(root)
    else:
        yield from _walk(root)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return None


def _in_repository(root: Path) -> bool:
    inside = _git(root, "rev-parse", "--is-inside-work-tree")
    if inside is None or inside.returncode or inside.stdout.strip() != b"true":
        return False
    # A folder that its repository ignores lists nothing: treat it as a project of its own.
    ignored = _git(root, "check-ignore", "-q", ".")
    return ignored is None or ignored.returncode != 0


def _git_list(root: Path, prefix: str = "") -> Iterator[str]:
    listing = _git(
        root / prefix if prefix else root, "ls-files", "-co", "--exclude-standard", "-z", "--", "."
    )
    if listing is None or listing.returncode:
        raise UsageError(
            f"{root / prefix}: git cannot list its files: "
            + (listing.stderr.decode(errors="replace").strip() if listing else "git is gone"),
            hint="mend the repository, or move the project out of it",
        )
    for raw in set(listing.stdout.split(b"\0")):
        name = prefix + os.fsdecode(raw)
        if raw in (b"", b"./"):  # "./": this folder is itself an entry, a submodule that was never fetched
            continue
        path = root / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository inside this one
            yield from _git_list(root, name.rstrip("/") + "/")
        else:
            yield name


def _walk(root: Path) -> Iterator[str]:
    """Yield files outside a repository, obeying each folder's .gitignore for what lies below it."""
    stack: list[tuple[str, tuple[tuple[str, Callable[[str], bool | None]], ...]]] = [("", ())]
    left_out = _matcher(ALWAYS_LEFT_OUT)
    while stack:
        folder, rules = stack.pop()
        own = _ignore_file(root / folder / ".gitignore")
        if own is not None:
            rules = (*rules, (folder, own))
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = folder + entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                tested = name + "/" if is_folder else name
                if left_out(tested) or _ignored(tested, rules):
                    continue
                if is_folder:
                    stack.append((tested, rules))
                else:
                    yield name


def _ignore_file(path: Path) -> Callable[[str], bool | None] | None:
    import pathspec

    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    spec = pathspec.GitIgnoreSpec.from_lines(lines)
    return lambda name: spec.check_file(name).include


def _ignored(name: str, rules: Sequence[tuple[str, Callable[[str], bool | None]]]) -> bool:
    """The deepest .gitignore that has an opinion decides, as in git."""
    for folder, rule in reversed(rules):
        verdict = rule(name.removeprefix(folder))
        if verdict is not None:
            return verdict
    return False


def _describe(root: Path, name: str) -> list[str | int] | None:
    path = root / name
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            return ["l", 0, 0, 0, os.fspath(path.readlink())]
    except FileNotFoundError:
        return None  # tracked by git, deleted here
    except OSError as error:
        raise UsageError(f"{name!r} cannot be sent to the nodes: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(
            f"{name!r} cannot be sent to the nodes: it is a {_kind(info.st_mode)}",
            hint="remove it, or name it in .gitignore or sync.exclude",
        )
    if not os.access(path, os.R_OK):
        raise UsageError(f"{name!r} cannot be sent to the nodes: you may not read it")
    mode = 0o755 if info.st_mode & 0o111 else 0o644
    return ["f", mode, info.st_size, info.st_mtime_ns, ""]


def _kind(mode: int) -> str:
    for test, word in ((stat.S_ISSOCK, "socket"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISDIR, "folder")):
        if test(mode):
            return word
    return "device"


def from_wire(manifest: Mapping[str, Sequence[str | int]]) -> Manifest:
    """Return a manifest as a node sent it: one character for each byte of a path (protocol.py)."""

    def path(text: str) -> str:
        return os.fsdecode(text.encode("latin-1"))

    return {path(name): [*entry[:4], path(str(entry[4]))] for name, entry in manifest.items()}


def difference(here: Manifest, there: Mapping[str, Sequence[object]]) -> Difference:
    """Return what must be sent and deleted so that a node with manifest `there` comes to have `here`."""
    send = tuple(name for name, entry in here.items() if list(there.get(name, ())) != entry)
    delete = tuple(name for name in there if name not in here)
    return Difference(send, delete, sum(int(here[name][2]) for name in send))


def check_size(project: Snapshot, to_send: Difference, max_mb: float) -> None:
    """Raise UsageError, naming the largest folders, where a sync would send more than the ceiling."""
    if to_send.size <= max_mb * 2**20:
        return
    top = "; ".join(
        f"{name} {size / 2**20:.0f} MiB" for name, size in largest(project.manifest, to_send.send)
    )
    raise UsageError(
        f"the sync would send {to_send.size / 2**20:.0f} MiB to every node, more than sync.max_mb = {number(max_mb)}: {top}",
        hint="name what should stay here in .gitignore or sync.exclude, or raise sync.max_mb",
    )


def largest(manifest: Manifest, names: Sequence[str], count: int = 3) -> list[tuple[str, int]]:
    """Return the largest top-level folders or files among `names`, with their bytes."""
    sizes: dict[str, int] = {}
    for name in names:
        top = name.split("/")[0] + ("/" if "/" in name else "")
        sizes[top] = sizes.get(top, 0) + int(manifest[name][2])
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def stream(project: Snapshot, to_send: Difference) -> Iterator[bytes]:
    """Yield what the agent's `apply` reads: a length, the header as JSON, and a tar stream of the files.

    Pieces are about 128 KiB, so that 2,000 small files are not 6,000 packets. A file that changes while it is read is padded or cut to the size in the manifest: the next sync sees the
    difference and sends it again.
    """
    pieces: list[bytes] = []
    waiting = 0
    for piece in _pieces(project, to_send):
        pieces.append(piece)
        waiting += len(piece)
        if waiting >= PIECE:
            yield b"".join(pieces)
            pieces, waiting = [], 0
    yield b"".join(pieces)


def _pieces(project: Snapshot, to_send: Difference) -> Iterator[bytes]:
    header = {"delete": to_send.delete, "send": len(to_send.send), "manifest": project.manifest}
    text = json.dumps(header).encode()
    yield struct.pack("!Q", len(text)) + text
    for name in to_send.send:
        kind, mode, size, mtime_ns, link = project.manifest[name]
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = int(mode), int(mtime_ns) // 10**9
        if kind == "l":
            member.type, member.linkname = tarfile.SYMTYPE, str(link)
        else:
            member.size = int(size)
        yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        if kind == "f":
            yield from _contents(project.root / name, member.size)
    yield b"\0" * 2 * tarfile.BLOCKSIZE


def _contents(path: Path, size: int) -> Iterator[bytes]:
    left = size
    try:
        file = path.open("rb")
    except OSError as error:
        raise CloudDDPError(
            f"{path}: cannot be sent to the nodes any more: {error.strerror}",
            hint="a file that comes and goes belongs in .gitignore or sync.exclude; repeat the command",
        ) from None
    with file:
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                yield b"\0" * left
                break
            left -= len(piece)
            yield piece
    yield b"\0" * (-size % tarfile.BLOCKSIZE)
