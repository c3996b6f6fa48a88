"""Files that jobs wrote on the nodes and nobody has pulled: asks the agents, marks files as pulled, describes them.

The nodes remember what was pulled, so that every laptop with the key knows. Only the project's folder is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cloudddp import nodes
from cloudddp.nodes import Runner
from cloudddp.protocol import Found, NewReply, PulledReply
from cloudddp.spec import JobSpec
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import one_line, size_of

LOOK_SECONDS = 30.0  # the agent itself looks for 10 at most


def look(
    runner: Runner, job: JobSpec, *, project: str, job_id: str = "", again: bool = False
) -> Outcome[NewReply]:
    """Return what each node holds of one job, or of all, that nobody has pulled, and why a node did not answer.

    `again`: retry over a new connection if the old one fails.
    """

    def one(node: int) -> NewReply:
        try:
            return ask(runner, node, job, project=project, job_id=job_id)
        except Exception:
            if not again:
                raise
            runner.reconnect(node)
            return ask(runner, node, job, project=project, job_id=job_id)

    return runner.each(one, fatal=lambda _: False)


def ask(
    runner: Runner, node: int, job: JobSpec, *, project: str, job_id: str = "", timeout: float = LOOK_SECONDS
) -> NewReply:
    """Return what one node holds that nobody has pulled. Raises NodeError."""
    wanted = json.dumps({"outputs": job.outputs, "scratch": job.scratch}).encode()
    options = [f"--project={project}", f"--job={job_id}"]
    return nodes.call(runner, node, "new", *options, answer=NewReply, stdin=wanted, timeout=timeout)


def mark(runner: Runner, node: int, names: Sequence[str], at: int, *, project: str) -> None:
    """Have a node remember that these paths have been pulled, as they were when it was looked at. Raises NodeError."""
    data = json.dumps({"names": list(names)}).encode()
    nodes.call(runner, node, "pulled", f"--project={project}", f"--at={at}", answer=PulledReply, stdin=data)


# -- words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """The new files of one node, of all jobs together: below the outputs, and elsewhere."""

    node: int
    outputs: tuple[Found, ...]
    others: tuple[Found, ...]
    complete: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The places outside the outputs, as `pull` takes them."""
        return names_of(self.others)


def held(replies: Mapping[int, NewReply]) -> list[Held]:
    """Return what the nodes hold, those that hold nothing left out."""
    found = [
        Held(
            node,
            tuple(one.outputs for one in reply.jobs if one.outputs.files),
            tuple(one.others for one in reply.jobs if one.others.files),
            reply.complete,
        )
        for node, reply in sorted(replies.items())
    ]
    return [one for one in found if one.outputs or one.others or not one.complete]


def names_of(found: Iterable[Found]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.name.rstrip("/") for one in found for place in one.places))


def described(found: Sequence[Found]) -> str:
    """Return `out/ (3 files, 1.2 MiB), model.pt (45.0 MiB)`."""
    files: dict[str, list[int]] = {}
    for place in (place for one in found for place in one.places):
        entry = files.setdefault(place.name, [0, 0])
        entry[0] += place.files
        entry[1] += place.size
    words = [
        f"{one_line(name, 200)} ({f'{count} files, ' if count > 1 else ''}{size_of(size)})"
        for name, (count, size) in files.items()
    ]
    more = sum(one.files for one in found) - sum(count for count, _ in files.values())
    return ", ".join(words) + (f" and {more} more file{'s' * (more > 1)}" if more > 0 else "")
