"""What is recorded at a launch for the report only. Values of variables are replaced wherever they appear. Of
a changed file that is not sent, or that holds secrets by its name, only the name is kept."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from cloudddp.cluster.model import Cluster
from cloudddp.config import project
from cloudddp.config.spec import Config
from cloudddp.files import resolved
from cloudddp.job import file_listing, project_files
from cloudddp.job.launch_record import LaunchFacts

MAX_DIFF, MAX_CHANGED = 200_000, 1 << 20  # characters; bytes of a changed file
_MOST = 500  # files
_SHORTEST = 8  # characters of a value that is looked for in other texts
_DIFF = (
    "diff HEAD --relative --no-renames --irreversible-delete --no-ext-diff --no-textconv --no-color".split()
)


def facts(
    typed: Sequence[str], cluster: Cluster, config: Config, root: Path, secret_files: Iterable[Path]
) -> LaunchFacts:
    """Return what is known before a launch. Raises UsageError where git is missing."""
    values = (*config.job.env.values(), config.job.notify or "")
    lines = {line for value in values for line in value.splitlines()}
    secrets = sorted((line for line in lines if len(line) >= _SHORTEST), key=len, reverse=True)

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "****")
        return text

    found = LaunchFacts(
        typed=shlex.join(map(hide, ("cloudddp", *typed))) if typed else "",
        began=time.time(),
        nodes=tuple((rank, one.id, one.type, one.zone) for rank, one in cluster.nodes.items()),
        hour=cluster.node_hour,
        spot=cluster.spot,
    )
    if project.repository_of(resolved(root)) is None:
        return found
    return _with_revision(found, root, project_files.shown_names(root, config, secret_files), hide)


def _with_revision(
    found: LaunchFacts, root: Path, may_show: Callable[[str], bool], hide: Callable[[str], str]
) -> LaunchFacts:
    def ask(*words: str) -> str:
        return file_listing.git(root, "--no-optional-locks", *words).stdout.decode(errors="replace")

    commit = ask("rev-parse", "--verify", "-q", "HEAD").strip()
    changed = ask("status", "--porcelain", "--no-renames", "--", ".").splitlines()
    names: list[str] = []
    if commit and any(not line.startswith("??") for line in changed):
        names = ask(*_DIFF, "--name-only", "-z").split("\0")[:-1]
    shown = [name for name in names if may_show(name) and not _is_large(root / name)][:_MOST]
    diff = hide(ask("--literal-pathspecs", *_DIFF, "--", *shown)) if shown else ""
    more = f"\n... and {len(diff) - MAX_DIFF:,} more characters" if len(diff) > MAX_DIFF else ""
    return msgspec.structs.replace(
        found,
        commit=commit or "none yet",
        changed=tuple(changed[:_MOST]),
        diff=diff[:MAX_DIFF] + more,
        withheld=tuple(name for name in names if name not in shown)[:_MOST],
    )


def _is_large(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > MAX_CHANGED
