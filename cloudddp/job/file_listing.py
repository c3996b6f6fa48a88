"""Which files a project has: those that git lists where it is a repository (tracked and untracked, not
ignored), else a walk that obeys the .gitignore files found on the way. Patterns are in their syntax.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.config import project
from cloudddp.errors import UsageError
from cloudddp.files import resolved
from cloudddp.text import one_line

NEVER_SENT = (
    ".git",
    "__pycache__/",
    ".venv/",
    "venv/",
    ".conda/",
    ".cloudddp/",
    ".cloudddp-incoming-*/",
    "cloudddp-logs/",
    f"/{REPLACED}",
    ".DS_Store",
)

# What git sets for hooks, aliases and `rebase --exec` (`git rev-parse --local-env-vars`): another repository
# than the project's.
_GIT_VARIABLES = """
    GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR GIT_DIR GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE
    GIT_NAMESPACE GIT_OBJECT_DIRECTORY GIT_PREFIX GIT_WORK_TREE
    """.split()


def is_below(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(folder + "/") for folder in folders)


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a path matches a .gitignore with these lines."""
    return _matcher(tuple(patterns))


@functools.cache
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    rules = [rule.regex for rule in spec.patterns if rule.include and rule.regex is not None]
    if not rules or any(rule.include is False for rule in spec.patterns) or "ps_d" in "".join(patterns):
        return lambda name: spec.match_file(_matchable(name))
    # Without `!` the order does not matter, and one expression for all takes a fifth of the time.
    texts = [rule.pattern.replace("(?P<ps_d>", "(?:") for rule in rules]
    search = re.compile("|".join(f"(?:{text})" for text in texts), rules[0].flags).search
    return lambda name: search(_matchable(name)) is not None


def _matchable(name: str) -> str:
    """Return a path for pathspec, whose `.` matches any character of a folder's name but a line end."""
    return name.replace("\n", "\0")


def is_pattern(line: str) -> bool:
    """Return whether a line of a .gitignore is valid. git ignores one that is not, such as `!` alone."""
    import pathspec

    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


@dataclass
class Listed:
    """The files that may be sent, and whether git tracks them. `unfetched`: submodules without a checkout."""

    files: dict[str, bool] = field(default_factory=dict)
    unfetched: list[str] = field(default_factory=list)
    ignored: list[str] | None = None  # by .gitignore, outside a repository

    def add(self, name: str, *, tracked: bool) -> None:
        self.files[name] = tracked or self.files.get(name, False)


def ignored_by_git(root: Path) -> list[str]:
    """Return the files and folders of a repository that git ignores; folders end in /."""
    words = ("-oiz", "--exclude-standard", "--directory", "--no-empty-directory", "--", ".")
    found = git(root, "ls-files", *words)
    return [os.fsdecode(raw) for raw in found.stdout.split(b"\0") if raw]


def include_ignored(
    listed: Listed,
    root: Path,
    included: Callable[[str], bool],
    on_error: Callable[[OSError], None] | None = None,
) -> None:
    """Add the files that match, also ignored ones. `on_error` gets a folder that cannot be read."""
    excluded = matcher(NEVER_SENT)
    for folder, folders, files in os.walk(root, onerror=on_error):
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else below + "/"
        folders[:] = [name for name in folders if not excluded(f"{prefix}{name}/")]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            if included(prefix + name):
                listed.add(prefix + name, tracked=False)


def list_files(root: Path) -> Listed:
    listed = Listed()
    if _in_repository(root):
        _git_list(listed, root)
    else:
        _walk(listed, root)
    return listed


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git there. Raises UsageError if it cannot be started."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    env["LC_ALL"] = "C"  # the messages that _git_list looks for
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], env=env, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            f"{root} is in a git repository, and git was not found, so it is not known which files to send",
            hint="install git",
        ) from None


def _in_repository(root: Path) -> bool:
    """Return whether git decides which files to send. Raises UsageError where git cannot read its
    repository."""
    top = project.repository_of(resolved(root))
    if top is None:
        return False
    inside = git(root, "rev-parse", "--is-inside-work-tree")
    if inside.returncode or inside.stdout.strip() != b"true":
        raise _unreadable(
            root, inside, f"fix the repository {top}, or remove {top / '.git'} if it is not a repository"
        )
    # A folder that its repository ignores lists nothing: treat it as a project of its own.
    ignored = git(root, "check-ignore", "-q", ".")
    if ignored.returncode not in (0, 1):
        raise _unreadable(root, ignored, f"fix the repository {top}")
    return ignored.returncode == 1


def _unreadable(folder: Path, failed: subprocess.CompletedProcess[bytes], hint: str) -> UsageError:
    printed = " ".join(failed.stderr.decode(errors="replace").split())
    error = one_line(printed, 1000) or "it is not a work tree"
    if advised := re.search("git config --global --add safe.directory .*", error):
        hint = f"if you trust that user: {advised[0]}"
    return UsageError(f"{folder}: git cannot list its files: {error}", hint=hint)


def _git_list(listed: Listed, root: Path, prefix: str = "") -> None:
    folder = root / prefix if prefix else root
    listing = git(folder, "ls-files", "-cot", "--exclude-standard", "-z", "--", ".")
    if listing.returncode:
        raise _unreadable(folder, listing, "fix the repository, or move the project out of it")
    if b"could not open directory" in listing.stderr:  # a warning: it would count as empty
        raise _unreadable(folder, listing, "make it readable, or name it in .gitignore")
    for line in set(listing.stdout.split(b"\0")):
        raw = line[2:]  # after a letter that is "?" for a file that git does not track
        name = prefix + os.fsdecode(raw)
        if raw == b"./":  # this folder is itself an entry: a submodule that was never fetched
            listed.unfetched.append(prefix.rstrip("/"))
        elif raw and os.path.isdir(path := f"{root}/{name}") and not os.path.islink(path):  # noqa: PTH112, PTH114
            # A submodule, or a repository inside this one.
            _git_list(listed, root, name.rstrip("/") + "/")
        elif raw:
            listed.add(name, tracked=line[:1] != b"?")


def _walk(listed: Listed, root: Path) -> None:
    """List the files of a project that is no repository. A .gitignore applies to all below its folder."""
    listed.ignored = []
    stack: list[tuple[str, tuple[tuple[str, Callable[[str], bool | None]], ...]]] = [("", ())]
    excluded = matcher(NEVER_SENT)
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
    spec = pathspec.GitIgnoreSpec.from_lines(filter(is_pattern, text.splitlines()))
    return lambda name: spec.check_file(_matchable(name)).include


def _ignored(name: str, rules: Sequence[tuple[str, Callable[[str], bool | None]]]) -> bool:
    """Whether a path is ignored: the deepest .gitignore with a matching rule decides, as in git."""
    for folder, rule in reversed(rules):
        verdict = rule(name.removeprefix(folder))
        if verdict is not None:
            return verdict
    return False
