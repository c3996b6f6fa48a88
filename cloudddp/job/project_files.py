"""Which files of the project go to the nodes.

The list is git's own where the project is a repository (tracked and untracked, not ignored), else a walk that obeys
the .gitignore files found on the way. Files that a job writes on a node are in no manifest, so they are never touched.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudddp import timings
from cloudddp.agent.protocol.manifest import (
    FILE,
    MAX_FILES,
    Entry,
    Folder,
    Manifest,
    entry_of,
    folder_digests,
    manifest_digest,
    manifest_to_wire,
    nested,
)
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError

RESULTS = "results"  # where `pull` puts results; never sent to the nodes

NEVER_SENT = (
    ".git",
    "__pycache__/",
    ".venv/",
    "venv/",
    ".cloudddp/",
    ".cloudddp-incoming-*/",
    ".DS_Store",
)

_SECRET = re.compile(r"\.env(?:\..*)?", re.DOTALL)


@dataclass(frozen=True)
class Snapshot:
    """The project's files on this computer, at one moment."""

    root: Path
    manifest: Manifest
    withheld: tuple[str, ...] = ()  # .env files and folders, which are not sent

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.values())

    @functools.cached_property
    def folders(self) -> dict[str, Folder]:
        """The manifest by folder, in wire form."""
        return nested(manifest_to_wire(self.manifest))

    @functools.cached_property
    def folder_digests(self) -> dict[str, str]:
        """A digest for each folder, equal for equal ones; a node computes the same."""
        return folder_digests(self.folders)

    @property
    def digest(self) -> str:
        return manifest_digest(self.folder_digests)


@timings.spanned("project files")
def of_config(root: Path, config: Config, *, secret_files: Iterable[Path] = ()) -> Snapshot:
    """Return the project's files that the settings select for the nodes. `secret_files` are withheld as `.env` is, wherever
    they are. Raises UsageError where there are no files, or too many."""
    keep_out = (*config.job.outputs, RESULTS)
    secret = frozenset(_names_below(root, secret_files))
    project = snapshot(root, exclude=config.sync.exclude, keep_out=keep_out, secret=secret)
    if not project.manifest:
        raise UsageError(f"{root} has no files to send", hint="run cloudddp in your project's folder")
    if len(project.manifest) > MAX_FILES:
        folders = Counter(name.split("/")[0] + "/" * ("/" in name) for name in project.manifest).most_common(
            3
        )
        raise UsageError(
            f"the project has {len(project.manifest):,} files, more than {MAX_FILES:,}: "
            + "; ".join(f"{name} {count:,}" for name, count in folders),
            hint="add what is not needed on the nodes to .gitignore or sync.exclude",
        )
    return project


def _names_below(root: Path, paths: Iterable[Path]) -> Iterator[str]:
    base = root.resolve()
    for path in paths:
        for found in (path.absolute(), path.resolve()):  # a link to it is not sent either
            if found.is_relative_to(base):
                yield found.relative_to(base).as_posix()


def snapshot(
    root: Path,
    *,
    exclude: Sequence[str] = (),
    keep_out: Sequence[str] = (),
    secret: frozenset[str] = frozenset(),
) -> Snapshot:
    """Return the files of a project. `exclude` are .gitignore patterns, `keep_out` exact paths (job outputs), `secret` exact
    paths that are withheld as `.env` is.

    Raises UsageError for what cannot be sent: a socket, a pipe, a device, an unreadable file.
    """
    for pattern in exclude:
        if not _is_pattern(pattern):
            raise UsageError(
                f"sync.exclude: {pattern!r} is not a pattern", hint="remove it, or see `man gitignore`"
            )
    base = f"{root}/"  # to join Paths takes longer than to look at the files
    excluded = _matcher((*NEVER_SENT, *exclude))
    outputs = [posixpath.normpath(out) for out in keep_out]  # "./runs/" is "runs"
    manifest: Manifest = {}
    names, withheld = _without_secrets(root, list(_list(root)), secret)
    for name in sorted(names):
        if excluded(name) or any(name == out or name.startswith(out + "/") for out in outputs):
            continue
        entry = _describe(base, name)
        if entry is not None:
            manifest[name] = entry
    return Snapshot(root, manifest, tuple(one for one in withheld if not excluded(one)))


def _without_secrets(root: Path, names: Sequence[str], known: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the names to send, and what is withheld: `.env` and `.env.*`, and `known` files, unless git tracks them.

    They hold secrets by convention, and outside a repository no .gitignore names them.
    """
    kept: list[str] = []
    secret: dict[str, list[str]] = {name: [name] for name in names if name in known}
    for name in names:
        if name in known:
            continue
        parts = name.split("/")
        at = next((k for k, part in enumerate(parts) if _SECRET.fullmatch(part)), None)
        if at is None:
            kept.append(name)
        else:
            secret.setdefault("/".join(parts[: at + 1]), []).append(name)
    withheld = []
    for found, below in sorted(secret.items()):
        tracked = _tracked(root, found)
        kept += [name for name in below if name in tracked]
        if not tracked.issuperset(below):
            withheld.append(found)
    return kept, withheld


def _tracked(root: Path, name: str) -> frozenset[str]:
    """Return the files at or below this path that git tracks; the path may be in a repository inside the project's."""
    folder, _, last = name.rpartition("/")
    listing = (
        _git(root / folder, "ls-files", "-c", "-z", "--", last) if _in_repository(root / folder) else None
    )
    if listing is None or listing.returncode:
        return frozenset()
    prefix = f"{folder}/" if folder else ""
    return frozenset(prefix + os.fsdecode(raw) for raw in listing.stdout.split(b"\0") if raw)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    rules = [rule.regex for rule in spec.patterns if rule.include and rule.regex is not None]
    if not rules or any(rule.include is False for rule in spec.patterns) or "ps_d" in "".join(patterns):
        return spec.match_file
    # Without `!` the order does not matter, and one expression for all takes a fifth of the time.
    texts = [rule.pattern.replace("(?P<ps_d>", "(?:") for rule in rules]
    search = re.compile("|".join(f"(?:{text})" for text in texts), rules[0].flags).search
    return lambda name: search(name) is not None


def _is_pattern(line: str) -> bool:
    """Return whether a line of a .gitignore is valid. git ignores one that is not, such as `!` alone."""
    import pathspec

    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


def _list(root: Path) -> Iterator[str]:
    if _in_repository(root):
        yield from _git_list(root)
    else:
        yield from _walk(root)


# What git sets for hooks, aliases and `rebase --exec` (`git rev-parse --local-env-vars`): another repository than the
# project's.
_GIT_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE",
    "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_WORK_TREE",
)  # fmt: skip


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], env=env, capture_output=True, check=False)
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
            + (listing.stderr.decode(errors="replace").strip() if listing else "git was not found"),
            hint="fix the repository, or move the project out of it",
        )
    for raw in set(listing.stdout.split(b"\0")):
        name = prefix + os.fsdecode(raw)
        if raw in (b"", b"./"):  # "./": this folder is itself an entry, a submodule that was never fetched
            continue
        if _is_folder(f"{root}/{name}"):  # a submodule, or a repository inside this one
            yield from _git_list(root, name.rstrip("/") + "/")
        else:
            yield name


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _walk(root: Path) -> Iterator[str]:
    """Yield the files of a project that is not a repository. A folder's .gitignore applies to everything below it."""
    stack: list[tuple[str, tuple[tuple[str, Callable[[str], bool | None]], ...]]] = [("", ())]
    excluded = _matcher(NEVER_SENT)
    while stack:
        folder, rules = stack.pop()
        own = _ignore_file(root / folder / ".gitignore")
        if own is not None:
            rules = (*rules, (folder, own))
        try:
            entries = list(os.scandir(root / folder))
        except FileNotFoundError:
            continue  # it was deleted meanwhile
        for entry in entries:
            name = folder + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            tested = name + "/" if is_folder else name
            if excluded(tested) or _ignored(tested, rules):
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
    try:
        spec = pathspec.GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error):
        spec = pathspec.GitIgnoreSpec.from_lines(filter(_is_pattern, lines))
    return lambda name: spec.check_file(name).include


def _ignored(name: str, rules: Sequence[tuple[str, Callable[[str], bool | None]]]) -> bool:
    """Whether a path is ignored: the deepest .gitignore with a matching rule decides, as in git."""
    for folder, rule in reversed(rules):
        verdict = rule(name.removeprefix(folder))
        if verdict is not None:
            return verdict
    return False


def _describe(base: str, name: str) -> Entry | None:
    path = base + name
    try:
        info = os.lstat(path)
        entry = entry_of(info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else "")  # noqa: PTH115
    except FileNotFoundError:
        return None  # tracked by git, deleted here
    except OSError as error:
        raise UsageError(f"{name!r} cannot be sent to the nodes: {error.strerror}") from None
    if entry is None:
        raise UsageError(
            f"{name!r} cannot be sent to the nodes: it is a {_kind(info.st_mode)}",
            hint="remove it, or add it to .gitignore or sync.exclude",
        )
    # Almost every file is this user's own, and readable: that takes one system call less.
    is_own = info.st_uid == os.geteuid() and info.st_mode & stat.S_IRUSR
    if entry.kind == FILE and not is_own and not os.access(path, os.R_OK):
        raise UsageError(f"{name!r} cannot be sent to the nodes: permission denied")
    return entry


def _kind(mode: int) -> str:
    for test, name in ((stat.S_ISSOCK, "socket"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISDIR, "folder")):
        if test(mode):
            return name
    return "device"
