"""Files that jobs have written in the project's folder on the nodes and that were not pulled yet. The nodes
record what was pulled, so that the list is the same on every laptop with the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.results import NewFiles, NewFilesReply, NewFilesRequest
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec import JobSpec
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import one_line, size_of

REPLY_SECONDS = 30.0  # the agent itself searches for 10 at most


def find_all(runner: Runner, job: JobSpec, job_id: str = "") -> Outcome[NewFilesReply]:
    """Return the new files of one job, or of all, on every node, and why a node did not answer."""
    message = request(runner, job, job_id)

    def ask(node: int) -> NewFilesReply:
        return client.call(runner, node, message, timeout=REPLY_SECONDS)

    return runner.each(client.repeated(runner, ask), fatal=lambda _: False)


def request(runner: Runner, job: JobSpec, job_id: str) -> NewFilesRequest:
    return NewFilesRequest(
        PROJECT,
        tuple(job.outputs),
        tuple(job.scratch),
        job_id,
        limit=int(job.pull_mb * 2**20),
        present=tuple(runner.ids.values()),
    )


def lost_files(replies: Mapping[int, NewFilesReply]) -> dict[int, list[str]]:
    """Return, by node, the newest files of nodes without a reply that no node with one has. Pure."""
    found: dict[int, list[str]] = {}
    for node in sorted({node for reply in replies.values() for node in reply.elsewhere} - replies.keys()):
        lists = [reply.elsewhere[node] for reply in replies.values() if node in reply.elsewhere]
        found[node] = [name for name in lists[0] if all(name in names for names in lists)]
    return {node: names for node, names in found.items() if names}


# -- for messages ------------------------------------------------------------------------------------------


def by_node(replies: Mapping[int, NewFilesReply]) -> dict[int, NewFilesReply]:
    """Return the replies of the nodes that have files which were not pulled, or may have."""
    return {
        node: reply
        for node, reply in sorted(replies.items())
        if reply.outputs or reply.others or reply.left or not reply.complete
    }


def names_of(found: Iterable[NewFiles]) -> tuple[str, ...]:
    """Return the paths of files and folders, each once, as `pull` takes them."""
    return tuple(dict.fromkeys(path.name.rstrip("/") for one in found for path in one.paths))


def describe(found: Sequence[NewFiles]) -> str:
    """Return `out/ (3 files, 1.2 MiB), model.pt (45.0 MiB)`."""
    totals: dict[str, list[int]] = {}
    for path in (path for one in found for path in one.paths):
        total = totals.setdefault(path.name, [0, 0])
        total[0] += path.files
        total[1] += path.size
    words = [
        f"{one_line(name, 200)} ({f'{count} files, ' if count > 1 else ''}{size_of(size)})"
        for name, (count, size) in totals.items()
    ]
    more = sum(one.files for one in found) - sum(count for count, _ in totals.values())
    return ", ".join(words) + (f" and {more} more file{'s' * (more > 1)}" if more > 0 else "")
