"""What is recorded at a launch for the report only: nodes, price, and the code as git knows it. The diff is
of files that are sent, hold no secrets by their names, and are no configuration, which may have values of
variables in any spelling; in the other files they are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cloudddp.agent.protocol.sentences import masked
from cloudddp.cluster.model import Cluster
from cloudddp.config import project
from cloudddp.config.spec import Config
from cloudddp.files import resolved
from cloudddp.job import file_listing, project_files
from cloudddp.job.launch_record import LaunchContext
from cloudddp.job.project_files import ProjectFiles, names_below

MAX_DIFF, MAX_CHANGED = 200_000, 1 << 20  # characters; bytes of a changed file
_MOST = 500  # files
_DIFF = "diff HEAD --relative --no-renames --no-ext-diff --no-textconv --no-color".split()


def facts(
    cluster: Cluster, config: Config, files: ProjectFiles, secret_files: Sequence[Path]
) -> LaunchContext:
    """Return what is known before a launch of these files. Raises UsageError where git is missing."""
    root, sent = files.root, files.manifest
    found = LaunchContext(
        nodes=tuple((rank, one.id, one.type, one.zone) for rank, one in cluster.nodes.items()),
        hour=cluster.node_hour,
        spot=cluster.spot,
    )
    if project.repository_of(resolved(root)) is None:
        return found
    commit = _git(root, "rev-parse", "--verify", "-q", "HEAD").strip()
    changed = _git(root, "status", "--porcelain", "--no-renames", "--", ".").splitlines()
    diff = ""
    if commit and any(not line.startswith("??") for line in changed):
        # Files with secrets that git tracks are sent.
        hidden = (*project_files.SECRETS, project.CONFIG_NAME)
        is_secret, own = file_listing.matcher(hidden), names_below(root, secret_files)
        names = [name for name in _git(root, *_DIFF, "--name-only", "-z").split("\0") if name in sent]
        names = [name for name in names if name not in own and not is_secret(name.lower())]
        shown = [name for name in names if sent[name].size <= MAX_CHANGED]
        diff = _git(root, "--literal-pathspecs", *_DIFF, "--", *shown[:_MOST]) if shown else ""
        diff = masked(diff, (*config.job.env.values(), config.job.notify or ""))
    return replace(
        found,
        commit=commit or "none yet",
        changed=tuple(changed[:_MOST]),
        diff=diff if len(diff) <= MAX_DIFF else f"{diff[:MAX_DIFF]}\n... and more",
    )


def _git(root: Path, *words: str) -> str:
    return file_listing.git(root, "--no-optional-locks", *words).stdout.decode(errors="replace")
