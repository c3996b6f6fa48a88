"""Which files of the project go to the nodes.

The list is git's own where the project is a repository (tracked and untracked, not ignored), else a walk that obeys
the .gitignore files found on the way. Files that a job writes on a node are in no manifest, so they are never touched.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import posixpath
import re
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp import timings
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
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
from cloudddp.config import project
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.job import secret_names
from cloudddp.safe_files import resolved
from cloudddp.text import one_line

MAX_LINKS = 40  # on the way to a file, as in Linux
RESULTS = "results"  # where `pull` puts results; never sent to the nodes

# Ignored in most projects, and not what a job reads.
_BUILT = (".*", "*.egg-info/", "*.pyc", "node_modules/", "build/", "dist/")

NEVER_SENT = (
    ".git",
    "__pycache__/",
    ".venv/",
    "venv/",
    ".cloudddp/",
    ".cloudddp-incoming-*/",
    ".DS_Store",
)


@dataclass(frozen=True)
class Snapshot:
    """The project's files on this computer, at one moment."""

    root: Path
    manifest: Manifest
    withheld: tuple[str, ...] = ()  # files and folders that may hold secrets, which are not sent
    unsent: tuple[str, ...] = ()  # files that git tracks, and that are not sent
    unfetched: tuple[str, ...] = ()  # submodules without a checkout
    ignored: tuple[str, ...] | None = None  # by .gitignore; None in a repository, where git knows

    def there(self, name: str) -> str | None:
        """Return the path in the project to which a path leads on the nodes, through the links that are sent; None where it
        leaves the project."""
        rest, links = name.split("/"), 0
        found: list[str] = []
        while rest:
            part = rest.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if not found:
                    return None
                found.pop()
                continue
            entry = self.manifest.get("/".join([*found, part]))
            if entry is None or entry.kind != LINK:
                found.append(part)
                continue
            links += 1
            if links > MAX_LINKS or entry.target.startswith("/"):
                return None
            rest = entry.target.split("/") + rest
        return "/".join(found)

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
    they are. Raises UsageError where there are no files, or too many, and for a folder that is no project."""
    project.require(root)
    keep_out = (*config.job.not_sent, RESULTS)
    secret = frozenset(_names_below(root, secret_files))
    files = snapshot(
        root, exclude=config.sync.exclude, include=config.sync.include, keep_out=keep_out, secret=secret
    )
    if not files.manifest:
        raise UsageError(f"{root} has no files to send", hint="run cloudddp in your project's folder")
    if len(files.manifest) > MAX_FILES:
        folders = Counter(name.split("/")[0] + "/" * ("/" in name) for name in files.manifest).most_common(3)
        raise UsageError(
            f"the project has {len(files.manifest):,} files, more than {MAX_FILES:,}: "
            + "; ".join(f"{name} {count:,}" for name, count in folders),
            hint="add what is not needed on the nodes to .gitignore or sync.exclude",
        )
    return files


def notes(files: Snapshot, config: Config) -> Iterator[str]:
    """Yield a line for each kind of files that a user would expect on the nodes, and that are not sent."""
    if files.withheld:
        yield (
            f"not sent, since they may hold secrets: {_some(files.withheld)} (--env-file passes variables; files that git "
            "tracks are sent)"
        )
    if files.unfetched:
        yield f"not sent: {_some(files.unfetched)}: submodules without files; `git submodule update --init` fetches them"

    if files.unsent:
        shown = [f"{name} ({_rule(name, config)})" for name in files.unsent[:3]]
        more = f" and {len(files.unsent) - 3} more" if len(files.unsent) > 3 else ""
        yield f"git tracks files that are not sent: {', '.join(shown)}{more}"
    if lost := _dangling(files, config):
        yield (
            f"links to files that are not sent, so the nodes do not have them: {_some(lost)}; copy the files into the project, or "
            "add the links to sync.exclude"
        )
    if ignored := _ignored_names(files, config):
        yield (
            f"not sent, since git's ignore rules name them: {_some(ignored)} (sync.include sends what the job needs, sync.exclude ends "
            "this message)"
        )


def _dangling(files: Snapshot, config: Config) -> list[str]:
    """Return the links that lead to a file here and to none on the nodes, with their targets."""
    links = [(name, entry.target) for name, entry in files.manifest.items() if entry.kind == LINK]
    folders = {parent for name in files.manifest for parent in _parents(name)} if links else set()
    found = []
    for name, target in links:
        there = files.there(name)
        is_sent = there is not None and (there in files.manifest or there in folders or not there)
        if is_sent or not (files.root / name).exists():
            continue
        if there is None or not _output(there, config):
            found.append(f"{name} -> {target}")
    return found


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _ignored_names(files: Snapshot, config: Config) -> list[str]:
    """Return the files and folders that .gitignore names, without those that are hidden or that tools build."""
    names: Sequence[str] = files.ignored or ()
    if files.ignored is None:
        words = ("-oiz", "--exclude-standard", "--directory", "--no-empty-directory", "--", ".")
        listing = _git(files.root, "ls-files", *words)
        names = [os.fsdecode(raw) for raw in listing.stdout.split(b"\0") if raw]
    scratch = [posixpath.normpath(out) for out in config.job.scratch]
    hidden = _matcher((*NEVER_SENT, *_BUILT, *config.sync.exclude, *config.sync.include))
    return [
        name for name in sorted(names)
        if not hidden(name) and not _rule(name.rstrip("/"), config) and not _is_below(name.rstrip("/"), scratch)
    ]  # fmt: skip


def _is_below(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(folder + "/") for folder in folders)


def _rule(name: str, config: Config) -> str:
    """Return the rule of cloudddp, not of git, by which a path is not sent; '' for none."""
    if pattern := next((one for one in NEVER_SENT if _matcher([one])(name)), ""):
        return f"{pattern} is never sent"
    if _is_below(name, [RESULTS]):
        return f"{RESULTS}/ is where `pull` puts results"
    if out := _output(name, config):
        named = out in config.job.outputs
        return f"job.outputs names {out}" if named else f"job.outputs is empty, and {out}/ is for results"
    return "sync.exclude names it" if _matcher(config.sync.exclude)(name) else ""


def _output(name: str, config: Config) -> str:
    """Return the output of jobs to which a path belongs, or ''."""
    return next((out for out in config.job.not_sent if _is_below(name, [posixpath.normpath(out)])), "")


def require_sent(files: Snapshot, config: Config, script: str) -> None:
    """Raise UsageError, with the reason, for a script that the nodes would not have."""
    there = files.there(script)
    if there is not None and there in files.manifest:
        return
    what = f"script {script} would not be on the nodes: "
    paths = [*reversed([*_parents(script)]), script]
    link = next((path for path in paths if (files.root / path).is_symlink()), None)
    if there is None and link is not None:
        target = (files.root / link).readlink()
        raise UsageError(
            f"{what}{link} is a link to {target}, outside the project",
            hint="copy the script into the project",
        )
    name = there or script
    if _is_below(name, files.withheld):
        hint = "rename it, let git track it, or give its path in sync.include"
        raise UsageError(f"{what}by its name it may hold secrets", hint=hint)
    if rule := _rule(name, config):
        raise UsageError(f"{what}{rule}", hint="move it to another folder, or change that setting")
    raise UsageError(
        f"{what}it is ignored by git",
        hint=f"`git check-ignore -v {name}` shows the rule; sync.include sends it",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(one_line(name, 80) for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


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
    include: Sequence[str] = (),
    keep_out: Sequence[str] = (),
    secret: frozenset[str] = frozenset(),
) -> Snapshot:
    """Return the files of a project. `exclude` are .gitignore patterns, `include` those of
    files that git ignores and that are sent, `keep_out` exact paths (job outputs), `secret` exact
    paths that are withheld as `.env` is.

    Raises UsageError for what cannot be sent: a socket, a pipe, a device, an unreadable file.
    """
    for key, patterns in (("exclude", exclude), ("include", include)):
        for number, pattern in enumerate(patterns):
            if not _is_pattern(pattern):
                raise UsageError(
                    f"sync.{key}: {pattern!r} is not a pattern", hint="remove it, or see `man gitignore`"
                )
            if pattern.startswith("!") and all(one.startswith("!") for one in patterns[:number]):
                raise UsageError(
                    f"sync.{key}: {pattern!r} has no effect: no pattern before it matches anything",
                    hint=f"to send files that .gitignore names: [sync] include = [{json.dumps(pattern[1:])}]",
                )
    base = f"{root}/"  # to join Paths takes longer than to look at the files
    excluded = _matcher((*NEVER_SENT, *exclude))
    outputs = [posixpath.normpath(out) for out in keep_out]  # "./runs/" is "runs"
    listed = _list(root)
    if include:
        _include(listed, root, _matcher(include))
    names, unsent = [], []
    for name, tracked in listed.files.items():
        if not (excluded(name) or any(name == out or name.startswith(out + "/") for out in outputs)):
            names.append(name)
        elif tracked and os.path.lexists(base + name):
            unsent.append(name)
    if unsent:
        unsent = sorted(itertools.filterfalse(_matcher(exclude), unsent))  # those were meant
    withheld = _secrets(root, listed, [name for name in names if name not in include], secret)
    manifest: Manifest = {}
    for name in sorted(names):
        if name in withheld:
            continue
        entry = _describe(base, name)
        if entry is not None:
            manifest[name] = entry
    return Snapshot(
        root,
        manifest,
        withheld=tuple(sorted({*withheld.values()})),
        unsent=tuple(unsent),
        unfetched=tuple(sorted(listed.unfetched)),
        ignored=None if listed.ignored is None else tuple(listed.ignored),
    )


def _secrets(root: Path, listed: _Listed, names: Iterable[str], known: frozenset[str]) -> dict[str, str]:
    """Return the files to withhold: `known` ones, and those that hold secrets by their names, unless git tracks them. The
    value is the file, or the folder that has such a name."""
    matches = _matcher(secret_names.PATTERNS)
    found = {}

    def is_secret(name: str) -> bool:
        return matches(name.lower())

    for name in names:
        if not (name in known or is_secret(name)) or listed.files[name]:
            continue
        if name not in known and secret_names.is_certificate(root / name):
            continue
        parents = (name[: slash.start() + 1] for slash in re.finditer("/", name))
        found[name] = next((parent.rstrip("/") for parent in parents if is_secret(parent)), name)
    return found


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


@dataclass
class _Listed:
    """The files that may be sent, and whether git tracks them. `unfetched`: submodules without a checkout."""

    files: dict[str, bool] = field(default_factory=dict)
    unfetched: list[str] = field(default_factory=list)
    ignored: list[str] | None = None  # by .gitignore, outside a repository

    def add(self, name: str, *, tracked: bool) -> None:
        self.files[name] = tracked or self.files.get(name, False)


def _include(listed: _Listed, root: Path, included: Callable[[str], bool]) -> None:
    """Add the files that match, whether or not they are ignored."""
    excluded = _matcher(NEVER_SENT)
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else below + "/"
        folders[:] = [name for name in folders if not excluded(f"{prefix}{name}/")]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            if included(prefix + name):
                listed.add(prefix + name, tracked=False)


def _list(root: Path) -> _Listed:
    listed = _Listed()
    if _in_repository(root):
        _git_list(listed, root)
    else:
        _walk(listed, root)
    return listed


# What git sets for hooks, aliases and `rebase --exec` (`git rev-parse --local-env-vars`): another repository than the
# project's.
_GIT_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE",
    "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_WORK_TREE",
)  # fmt: skip


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git there. Raises UsageError if it cannot be started."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], env=env, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            f"{root} is in a git repository, and git was not found, so it is not known which files to send",
            hint="install git",
        ) from None


def _in_repository(root: Path) -> bool:
    """Return whether git decides which files to send. Raises UsageError for a repository that git cannot read: its ignored
    files would be sent."""
    top = project.repository_of(resolved(root))
    if top is None:
        return False
    inside = _git(root, "rev-parse", "--is-inside-work-tree")
    if inside.returncode or inside.stdout.strip() != b"true":
        raise _unreadable(root, inside, f"fix the repository {top}, or remove {top / '.git'} if it is none")
    # A folder that its repository ignores lists nothing: treat it as a project of its own.
    ignored = _git(root, "check-ignore", "-q", ".")
    if ignored.returncode not in (0, 1):
        raise _unreadable(root, ignored, f"fix the repository {top}")
    return ignored.returncode == 1


def _unreadable(folder: Path, failed: subprocess.CompletedProcess[bytes], hint: str) -> UsageError:
    said = one_line(" ".join(failed.stderr.decode(errors="replace").split()), 1000) or "it is no work tree"
    if advised := re.search("git config --global --add safe.directory .*", said):
        hint = f"if you trust that user: {advised[0]}"
    return UsageError(f"{folder}: git cannot list its files: {said}", hint=hint)


def _git_list(listed: _Listed, root: Path, prefix: str = "") -> None:
    folder = root / prefix if prefix else root
    listing = _git(folder, "ls-files", "-cot", "--exclude-standard", "-z", "--", ".")
    if listing.returncode:
        raise _unreadable(folder, listing, "fix the repository, or move the project out of it")
    for line in set(listing.stdout.split(b"\0")):
        raw = line[2:]  # after a letter that is "?" for a file that git does not track
        name = prefix + os.fsdecode(raw)
        if raw == b"./":  # this folder is itself an entry: a submodule that was never fetched
            listed.unfetched.append(prefix.rstrip("/"))
        elif raw and _is_folder(f"{root}/{name}"):  # a submodule, or a repository inside this one
            _git_list(listed, root, name.rstrip("/") + "/")
        elif raw:
            listed.add(name, tracked=line[:1] != b"?")


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _walk(listed: _Listed, root: Path) -> None:
    """List the files of a project that is not a repository. A folder's .gitignore applies to everything below it."""
    listed.ignored = []
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
        if folder and any(entry.name == ".git" for entry in entries):  # a repository inside the project
            _git_list(listed, root, folder)
            continue
        for entry in entries:
            name = folder + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            tested = name + "/" if is_folder else name
            if excluded(tested):
                continue
            if _ignored(tested, rules):
                listed.ignored.append(tested)
            elif is_folder:
                stack.append((tested, rules))
            else:
                listed.add(name, tracked=False)


def _ignore_file(path: Path) -> Callable[[str], bool | None] | None:
    import pathspec

    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")  # git skips a byte order mark
    except OSError:
        return None
    try:
        spec = pathspec.GitIgnoreSpec.from_lines(lines := text.splitlines())
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
