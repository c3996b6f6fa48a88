"""Puts pulled results back at their places in the project on the nodes (`sync --results`).

The nodes do not record them as files of a sync: the next sync leaves them alone, as it does what a job wrote.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import newest_complete, refusal
from cloudddp.agent.protocol.codec import is_job_id
from cloudddp.agent.protocol.manifest import MAX_FILES, Entry, Manifest, entry_of, manifest_to_wire, nested
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.results import PulledRequest
from cloudddp.agent.protocol.transfer import Listing
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, Command, Text, UsageError
from cloudddp.formats import counted
from cloudddp.job import project_files
from cloudddp.job.results import checkpoints, new_files, safe_names
from cloudddp.job.results.safe_names import INCOMPLETE, LOGS
from cloudddp.job.sync import report_replaced
from cloudddp.job.transfer import Transfer


def results_here(root: Path) -> list[Path]:
    """Return the folders of results in a project, by job, the newest last, that have more than logs."""
    base = root / project_files.RESULTS
    found = sorted(path for path in base.glob("*") if is_job_id(path.name) and path.is_dir())
    return [path for path in found if any(_is_result(one.name) for one in path.iterdir())]


def _is_result(name: str) -> bool:
    return name == INCOMPLETE or not safe_names.guarded(name)


def check_complete(folder: Path) -> list[str]:
    """Return which checkpoints are incomplete in a folder of results, so that they are not sent. Raises
    UsageError if no other one with the same name but its number is complete: a job would begin at zero."""
    problems = {name: part.problem for name, part in checkpoints.read(folder).items()}
    incomplete = {name: refusal(name, problems) for name, why in problems.items() if why}
    for name, why in incomplete.items():
        if not newest_complete(name, problems):
            raise UsageError(
                f"{why}; no results were sent",
                hint=f"to send the others, remove {folder / LOGS / checkpoints.FILE}",
            )
    return list(incomplete.values())


def restore(
    runner: Runner,
    cluster: Cluster,
    job: JobSpec,
    folder: Path,
    *,
    project: Collection[str],
    progress: Callable[[Text], None],
) -> int:
    """Send the results in `folder` to the nodes, but for files of the `project`; return how many there are. A
    folder `nodeN` goes to that node only. Raises UsageError, NodeError; CloudDDPError while a job runs."""
    own = {node: folder / f"node{node}" for node in cluster.nodes if (folder / f"node{node}").is_dir()}
    common = _manifest(folder, [path.name for path in own.values()])
    known = checkpoints.read(folder)
    parts = [(folder, common, sorted(cluster.nodes))]
    parts += [(path, _manifest(path, ()), [node]) for node, path in own.items()]
    probes = probe(runner, cluster, only_files=True)
    for node, reply in sorted(probes.items()):
        for running in reply.running:  # it may be writing these files
            raise CloudDDPError(
                f"job {running} is running on node {node}: no results were sent",
                hint=("repeat when it has ended; ", Command("cancel", running), " stops it"),
            )
    count = 0
    for root, found, nodes in parts:
        manifest = {name: entry for name, entry in found.items() if name not in project}
        if not manifest:
            continue
        progress(f"sending {counted(len(manifest), 'file')} of {root} to {counted(len(nodes), 'node')}")
        replies = (
            Transfer(
                runner,
                root,
                Listing(nested(manifest_to_wire(manifest))),
                [Peer(node, cluster.nodes[node].private_ip, probes[node].free_port) for node in nodes],
                approve=lambda _node, _wants: None,
                note=progress,
                adds=True,
            )
            .run()
            .all()
        )
        report_replaced(replies, progress)
        for node in nodes:  # they are here: they do not wait to be pulled
            time_ns = new_files.find(runner, node, job, project=PROJECT).time_ns
            request = PulledRequest(
                PROJECT, tuple(sorted(manifest)), time_ns, put_back=True, checkpoints=tuple(known.values())
            )
            client.call(runner, node, request)
        count += len(manifest)
    return count


def _manifest(root: Path, without: Iterable[str]) -> Manifest:
    """Return the files and links below a folder, `without` some at its top."""
    found = dict(_entries(root, frozenset(without)))
    if len(found) > MAX_FILES:
        raise UsageError(f"{root} has more than {MAX_FILES:,} files", hint="move some of them elsewhere")
    return found


def _entries(root: Path, without: Collection[str]) -> Iterator[tuple[str, Entry]]:
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in without]
        folders[:] = [name for name in folders if not safe_names.guarded(name)]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*names, *links):
            path = Path(folder) / name
            info = path.lstat()
            entry = entry_of(info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else "")  # noqa: PTH115
            if entry is not None and not safe_names.guarded(name):
                yield path.relative_to(root).as_posix(), entry
