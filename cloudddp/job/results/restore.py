"""Puts pulled results back at their places in the project on the nodes (`sync --results`).

The nodes do not record them as files of a sync: the next sync leaves them alone, as it does what a job wrote.
"""

from __future__ import annotations

import os
import posixpath
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import checkpoints as shards
from cloudddp.agent.protocol.checkpoints import Part, folder_of, is_shard, refusal
from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.agent.protocol.file_steps import ReceiveRequest
from cloudddp.agent.protocol.manifest import MAX_FILES, Manifest, entry_of
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.errors import Message, StepWarning, UsageError, q
from cloudddp.formats import plural
from cloudddp.job import launch_record
from cloudddp.job.project_files import RESULTS, ProjectFiles
from cloudddp.job.results import checkpoints, safe_names
from cloudddp.job.results.safe_names import INCOMPLETE, LOGS
from cloudddp.job.sync import report_replaced
from cloudddp.job.transfer import Transfer, View


def results_here(root: Path) -> list[Path]:
    """Return the folders of results in a project, by job, the newest last, that have more than logs."""
    base = root / RESULTS
    found = sorted(path for path in base.glob("*") if has_job_id_format(path.name) and path.is_dir())

    def is_result(name: str) -> bool:
        return name == INCOMPLETE or not safe_names.guarded(name)

    return [path for path in found if any(is_result(one.name) for one in path.iterdir())]


def chain(root: Path, job_id: str | None) -> tuple[list[Path], list[str]]:
    """Return the folders of results of a job, by default the newest, and of those that it continued, the
    oldest first; and the jobs that continued it without results here. Raises UsageError for a missing
    folder."""
    base, found = root / RESULTS, results_here(root)
    chosen = [path for path in found if job_id in (None, path.name)]
    if not chosen:
        available = f"available: {', '.join(path.name for path in found[-5:])}"
        raise UsageError(
            f"{base} has no results" + (f" of job {job_id}" if job_id else ""),
            hint=available if found else Message("`cloudddp pull` copies them"),
        )
    last = chosen[-1].name
    jobs, later = launch_record.chain_of(last)
    if missing := [job for job in jobs if not (base / job).is_dir()]:
        without = shlex.join(["mkdir", "-p", *(str(base / one) for one in missing)])
        raise UsageError(
            f"job {last} continued {', '.join(missing)}, of which {base} has nothing; no results were sent",
            hint=f"`cloudddp pull --job {q(missing[0])}` copies results while nodes have them; `{without}` "
            "goes on without them",
        )
    return [base / job for job in jobs], [one for one in later if not (base / one).is_dir()]


def check_complete(folders: Sequence[Path]) -> list[str]:
    """Return which checkpoints in these folders of results, the oldest first, are not sent, and why: they are
    incomplete. Raises UsageError for one of the last job that has any, if none with its name and another
    number is complete: a job would begin at zero."""
    known = {folder: parts for folder in folders if (parts := checkpoints.read(folder))}
    problems = {name: part.problem for parts in known.values() for name, part in parts.items()}
    incomplete = {name: refusal(name, problems) for name, why in problems.items() if why}
    for name, why in incomplete.items():
        last = list(known)[-1]
        if name in known[last] and not shards.newest_complete(name, problems):
            raise UsageError(
                f"{why}; no results were sent",
                hint=f"to send the others, remove {last / LOGS / checkpoints.FILE}",
            )
    return list(incomplete.values())


def restore(
    runner: Runner,
    cluster: Cluster,
    folders: Sequence[Path],
    *,
    project: Collection[str],
    progress: Callable[[str], None],
) -> int:
    """Send the results in `folders`, the oldest first, to the nodes, but for files of the `project`; return
    how many there are. A folder `nodeN` goes to that node only, if there is one. Raises UsageError, and
    NodeError, also while a job runs: it may be writing these files."""
    parts = newest(folders, cluster.nodes)
    count = 0
    for root, found, nodes, known in parts:
        manifest = {name: entry for name, entry in found.items() if name not in project}
        if manifest and not nodes:
            progress(StepWarning(f"not sent: {root}, since the cluster has no node of that number"))
        if not (manifest and nodes):
            continue
        progress(f"sending {plural(len(manifest), 'file')} of {root} to {plural(len(nodes), 'node')}")
        files, addresses = (
            ProjectFiles(root, manifest),
            {node: cluster.nodes[node].private_ip for node in nodes},
        )
        request = ReceiveRequest(PROJECT, put_back=known)
        report_replaced(Transfer(runner, files, addresses, View(progress), request).run().all(), progress)
        count += len(manifest)
    return count


def newest(
    folders: Sequence[Path], nodes: Collection[int]
) -> list[tuple[Path, Manifest, list[int], tuple[Part, ...]]]:
    """Return what to send, in this order: a folder, its files, the nodes that get them, and the sharded
    checkpoints among them. No node gets the folder of one that is not in the cluster. A file is left out
    where a later job has it, and one of a sharded checkpoint where a later job has any shard of that: files
    of two saves are no checkpoint."""
    found: list[tuple[Path, Manifest, list[int], tuple[Part, ...]]] = []
    names: set[str] = set()
    later: set[str] = set()  # folders of checkpoints
    own = {f"node{node}": node for node in nodes}
    for folder in reversed(folders):
        known, saved = checkpoints.read(folder), defaultdict[str, list[str]](list)
        ended = {path.name for path in (folder / LOGS).glob("node*")} - own.keys()
        manifest, chosen = _manifest(folder), {place: Manifest() for place in ("", *own, *sorted(ended))}
        for name, entry in manifest.items():
            first, _, rest = name.partition("/")
            place, path = (first, rest) if rest and first in chosen else ("", name)
            if names.isdisjoint((name, path)) and folder_of(path, later) is None:
                chosen[place][path] = entry
            if is_shard(path):
                saved[shards.checkpoint_of(posixpath.dirname(path))].append(path)
        names |= manifest.keys()
        later |= known.keys() | {one for one, paths in saved.items() if shards.is_sharded(paths)}
        for place in reversed(chosen):
            to = [node for name, node in own.items() if place in ("", name)]
            found.append((folder / place, chosen[place], to, tuple(known.values())))
    return found[::-1]


def _manifest(root: Path) -> Manifest:
    found = Manifest()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not safe_names.guarded(name)]
        for path in (Path(folder, name) for name in (*names, *folders) if not safe_names.guarded(name)):
            target = os.readlink(path) if path.is_symlink() else ""  # noqa: PTH115
            if (entry := entry_of(path.lstat(), target)) is not None:
                found[path.relative_to(root).as_posix()] = entry
    if len(found) > MAX_FILES:
        raise UsageError(f"{root} has more than {MAX_FILES:,} files", hint="move some of them elsewhere")
    return found
