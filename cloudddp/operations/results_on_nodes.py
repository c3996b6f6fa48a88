"""Messages about a job's results that are still on its nodes, or were lost with them."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import listed
from cloudddp.agent.protocol.results import NewFiles, NewFilesReply
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import UsageError, inert, q
from cloudddp.formats import toml
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.results import new_files, safe_names
from cloudddp.job.results.new_files import names_of
from cloudddp.operations.reporter import Reporter
from cloudddp.text import node_list, one_line

_SHOWN = 5  # files that were left out


def only_elsewhere(runner: Runner, name: str) -> str:
    """Return what to do about a file that a rank did not find and that jobs wrote on some nodes only; '' for
    any other one. `name` may be an absolute path on a node. Never fails."""
    path = posixpath.normpath(name.rpartition(f"/{PROJECT}/")[2])
    found = new_files.find_all(runner, JobSpec(outputs=(path,)))
    having = [node for node, one in found.values.items() if one.outputs]
    if path == "." or found.errors or len(having) in (0, len(found.values)):
        return ""
    have = f"{node_list(having)} {'has' if len(having) == 1 else 'have'}"
    folder = json.dumps(path.partition("/")[0] if "/" in path else "shared", ensure_ascii=False)
    return (
        f"only {have} {one_line(path, 200)}; nodes share no disk: add to cloudddp.toml the lines [[shared]] "
        f"and path = {folder}, once that folder was pulled and removed from the nodes"
    )


def report_new(console: Reporter, runner: Runner, settings: Config, finished: JobResult) -> None:
    """Report after a launch which results `pull` copies, which new files it does not, and which are lost."""
    runner.leave_out([node for node in finished.lost if node in runner.nodes])
    found = new_files.find_all(runner, settings.job, finished.job).values
    report_lost(console, found)
    if not finished.lost:
        report_held(console, found, settings)
    if found and not new_files.by_node(found):
        console.log("no new file is in the project; files that a script writes elsewhere are not pulled")


def report_lost(console: Reporter, replies: Mapping[int, NewFilesReply]) -> None:
    """Report which files only nodes without a reply have, as far as the other nodes know of them."""
    for node, names in new_files.lost_files(replies).items():
        console.warn(
            f"only node {node} has {one_line(listed(names), 300)}: while ranks run, what they save is not "
            "copied to other nodes. A [[shared]] folder is on all of them"
        )


def report_held(console: Reporter, replies: Mapping[int, NewFilesReply], settings: Config) -> None:
    """Report the files on the nodes that were not pulled, and the command that pulls them."""
    held = new_files.by_node(replies)
    if found := {node: one for node, one in held.items() if one.outputs}:
        listed = ", ".join(f"node {node}: {new_files.describe(one.outputs)}" for node, one in found.items())
        console.suggest(f"results: {inert(listed)}; next: {pull_command(found)}")
    for node, one in held.items():
        if one.left:
            console.warn(f"left out by a pull: {line_of(node, one)}")
    if others := {node: one for node, one in held.items() if one.others}:
        listed = "; ".join(f"node {node}: {new_files.describe(one.others)}" for node, one in others.items())
        new = [new for other in others.values() for new in other.others]
        what = f"more than job.pull_mb = {settings.job.pull_mb:g} MiB of a node"
        instead = "what nobody needs belongs in [job] scratch"
        if outputs := settings.job.outputs:
            what = f"files outside job.outputs = {toml(outputs)}"
            names = inert(toml([*outputs, *names_of(new)]))
            instead = f"or set outputs = {names} in [job] of cloudddp.toml"
        console.warn(f"`pull` does not copy {what}: {listed}")
        console.suggest(f"  {pull_command(others, new)} copies them; {instead}")


def line_of(node: int, held: NewFilesReply) -> str:
    """Return what one node holds: new files, and why some were left out."""
    what = new_files.describe((*held.outputs, *held.others)) or "files"
    why = "".join(f"; {one_line(one.name, 200)}: {one_line(one.reason, 200)}" for one in held.left[:_SHOWN])
    rest = "" if held.complete else "; there are too many files to check them all"
    return f"node {node}: {what}{why}{rest}"


def pull_command(held: Mapping[int, NewFilesReply], found: Iterable[NewFiles] = ()) -> str:
    """Return the command that pulls these files, or the outputs, from the node of rank 0 or from all that
    hold some. Nodes choose the names, and the user types them: `--` keeps them from being options, and one
    that a terminal would not show unchanged is left out."""
    names = [name for name in names_of(found) if _can_be_typed(name)]
    end = ["--"] if any(name.startswith("-") for name in names) else []
    words = [*(["--all-nodes"] if any(not one.rank_zero for one in held.values()) else []), *end, *names]
    return f"`{q('cloudddp', 'pull', *words)}`"


def _can_be_typed(name: str) -> bool:
    try:
        parts = safe_names.requested([name])
    except UsageError:
        return False
    return one_line(name) == name and not any(safe_names.guarded(part) for path in parts for part in path)
