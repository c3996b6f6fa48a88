"""What the nodes will lack of a project, and by which rule: a note, or an error where it is the script."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from cloudddp.agent.protocol.manifest import LINK
from cloudddp.cluster.connect import PROJECT
from cloudddp.config import package_inputs
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.job import file_listing, project_scan
from cloudddp.job.project_files import RESULTS, ProjectFiles, of_config
from cloudddp.job.results.incoming import identity_of
from cloudddp.text import one_line, some

# Ignored in most projects, and not what a job reads.
_BUILT = (".*", "*.egg-info/", "*.pyc", "node_modules/", "build/", "dist/")

_FOR_LINKS = "copy the files into the project, or into the folder that [[data]] names"


def notes(files: ProjectFiles, config: Config, script: str = "", args: Sequence[str] = ()) -> Iterator[str]:
    """Yield a line for each kind of files that a user would expect on the nodes, and that are not sent.
    `script`, `args`: what is launched; the script by its path in the project."""
    if files.withheld:
        yield (
            f"not sent, since they may hold secrets: {_shown(files.withheld)} (--env-file passes variables, "
            "sync.exclude ends this message)"
        )
    if files.unfetched:
        fetches = "`git submodule update --init` fetches them"
        yield f"not sent: {_shown(files.unfetched)}: submodules without files; {fetches}"
    if files.unsent:
        shown = [f"{name} ({_rule(name, config)})" for name in files.unsent[:3]]
        more = f" and {len(files.unsent) - 3} more" if len(files.unsent) > 3 else ""
        yield f"git tracks files that are not sent: {', '.join(shown)}{more}"
    if lost := _dangling(files, config):
        yield (
            f"links to files that are not sent, so the nodes do not have them: {_shown(lost)}; {_FOR_LINKS}, "
            "or add the links to sync.exclude"
        )
    read = package_inputs.read(files.root, config.setup)
    paths, is_below = (*read.whole, *read.editable), package_inputs.is_below
    lost = [path for path in paths if not any(is_below(name, path) for name in files.manifest)]
    if lost := [*lost, *read.outside]:
        yield (
            f"{config.setup.environment} names what is not sent, so nodes cannot install it: {_shown(lost)}; "
            "copy it into the project, and check that neither .gitignore nor sync.exclude names it"
        )
    ignored = _ignored_names(files, config)
    named = project_scan.named_by(files.root, script, args, ignored) if script and ignored else []
    for folder in named:
        why = f"since git ignores it, and {script} or its arguments name it"
        yield f"{folder} is not sent, {why}: {_as_data(folder.rstrip('/'))}"
    if ignored := [name for name in ignored if name not in named]:
        yield (
            f"not sent, since git's ignore rules name them: {_shown(ignored)} (sync.include sends what the "
            "job needs, sync.exclude ends this message)"
        )


def _dangling(files: ProjectFiles, config: Config) -> list[str]:
    """Return links, with their targets, that lead to a file here and not to the same one on the nodes."""
    links = [(name, entry.target) for name, entry in files.manifest.items() if entry.kind == LINK]
    folders = _folders(files) if links else set()
    is_excluded = file_listing.matcher(config.sync.exclude)  # a link in [[data]] that is sent all the same

    def dangles(name: str) -> bool:
        if _arrives(files, folders, name) or is_excluded(name) or _identity(files, name) is None:
            return False
        there = files.there(name)
        return there is None or not (_output(there, config) or file_listing.is_below(there, config.links))

    return [f"{name} -> {target}" for name, target in links if dangles(name)]


def _arrives(files: ProjectFiles, folders: Collection[str], name: str) -> bool:
    """Return whether a path leads to the same file or folder on the nodes as here. A link in [[data]] may
    lead to another one, since that folder lies elsewhere here."""
    there = files.there(name)
    is_sent = there is not None and (there in files.manifest or there in folders or not there)
    return is_sent and _identity(files, name) == _identity(files, there or "")


def _identity(files: ProjectFiles, name: str) -> tuple[int, int] | None:
    """Return device and inode of the file here to which a path on the nodes leads; None without one."""
    return identity_of(files.root / files.locate(name))


def _folders(files: ProjectFiles) -> set[str]:
    return {parent for name in files.manifest for parent in _parents(name)}


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _ignored_names(files: ProjectFiles, config: Config) -> list[str]:
    """Return what .gitignore names, without what is hidden and what tools build."""
    names = file_listing.ignored_by_git(files.root) if files.ignored is None else files.ignored
    known = (*files.data, *(posixpath.normpath(out) for out in config.job.scratch))
    sync = config.sync
    hidden = file_listing.matcher((*file_listing.NEVER_SENT, *_BUILT, *sync.exclude, *sync.include))
    return [
        name
        for name in sorted(names)
        if not (hidden(name) or _rule(name.rstrip("/"), config))
        and not file_listing.is_below(name.rstrip("/"), known)
    ]


def _rule(name: str, config: Config) -> str:
    """Return the rule of cloudddp, not of git, by which a path is not sent; '' for none."""
    if pattern := next((one for one in file_listing.NEVER_SENT if file_listing.matcher([one])(name)), ""):
        return f"{pattern} is never sent"
    if file_listing.is_below(name, [RESULTS]):
        return f"{RESULTS}/ is where `pull` puts results"
    if out := _output(name, config):
        named = out in config.job.outputs
        return f"job.outputs names {out}" if named else f"job.outputs is empty, and {out}/ is for results"
    return "sync.exclude names it" if file_listing.matcher(config.sync.exclude)(name) else ""


def _output(name: str, config: Config) -> str:
    """Return the output of jobs to which a path belongs, or ''."""
    return next(
        (out for out in config.job.not_sent if file_listing.is_below(name, [posixpath.normpath(out)])), ""
    )


def require_sent(files: ProjectFiles, config: Config, script: str) -> None:
    """Raise UsageError, with the reason, for a script that the nodes would not have."""
    there = files.there(script)
    if there is not None and there in files.manifest:
        return
    what = f"script {script} would not be on the nodes: "
    paths = [*reversed([*_parents(script)]), script]
    link = next((path for path in paths if (files.root / path).is_symlink()), None)
    if there is None and link is not None:
        target = (files.root / link).readlink()
        text = f"{what}{link} is a link to {target}, outside the project"
        raise UsageError(text, hint="copy the script into the project")
    name = there or script
    if file_listing.is_below(name, files.withheld):
        hint = "rename it, let git track it, or give its path in sync.include"
        raise UsageError(f"{what}by its name it may hold secrets", hint=hint)
    if rule := _rule(name, config):
        raise UsageError(f"{what}{rule}", hint="move it to another folder, or change that setting")
    raise UsageError(
        f"{what}it is ignored by git",
        hint=f"`git check-ignore -v {name}` shows the rule; sync.include sends it",
    )


def reason(root: Path, config: Config, name: str) -> str:
    """Return why a file that a rank did not find was not sent, '' if this project has no such file."""
    path = posixpath.normpath(name)
    if posixpath.isabs(path):
        path = path.rpartition(f"/{PROJECT}/")[2]  # as a script on a node may name it
    try:
        files = None if path.startswith(("/", "..")) else of_config(root, config)
        if files is None or _arrives(files, _folders(files), path) or _identity(files, path) is None:
            return ""
    except (OSError, ValueError, UsageError):
        # A name that no file can have; a project that has changed since.
        return ""
    there, shown = files.there(path), one_line(path, 200)
    if there is not None and file_listing.is_below(there, config.links):
        return ""  # nodes have it from elsewhere
    if there is None or _identity(files, there) != _identity(files, path):
        real = one_line(os.path.realpath(root / files.locate(path)), 200)
        return f"{shown} leads through a link to {real}, which was not sent to the nodes: {_FOR_LINKS}"
    path, shown = there, one_line(there, 200)
    here = f"{shown} is on this computer and was not sent to the nodes"
    if file_listing.is_below(path, files.withheld):
        return f"{here}: by its name it may hold secrets"
    if rule := _rule(path, config):
        return f"{here}: {rule}"
    is_folder = (root / files.locate(path)).is_dir()
    if is_folder and not any(names for *_, names in os.walk(root / files.locate(path))):
        return f"{shown} has no files here, and folders without files are not sent: the script has to make it"
    folder, slash, _ = path.partition("/")
    include = f"[sync] include = {json.dumps([path])} in cloudddp.toml sends it"
    return f"{here}, since git ignores it: {_as_data(folder) if slash or is_folder else include}"


def _as_data(folder: str) -> str:
    source = json.dumps(folder, ensure_ascii=False)
    return f"to send it, add to cloudddp.toml the lines [[data]] and source = {source}"


def _shown(names: Sequence[str]) -> str:
    return some([one_line(name, 80) for name in names], 5)
