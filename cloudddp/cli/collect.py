"""Pulls a run's results before its nodes are terminated, and reports what could not be pulled.

`run` terminates nodes only when all new files on them have been pulled: new files outside `job.outputs`, or results
whose transfer failed, keep the cluster until its deadline.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudddp.cli.common import Session
from cloudddp.cli.say import counted, note, toml
from cloudddp.text import size_of

if TYPE_CHECKING:
    from pathlib import Path

    from cloudddp.nodes import Runner
    from cloudddp.outputs import Held
    from cloudddp.protocol import NewReply
    from cloudddp.spec import Config


@dataclass(frozen=True, slots=True)
class Left:
    """What the nodes still hold, one line per node, and the command that pulls it."""

    lines: tuple[str, ...] = ()
    pull: str = "cloudddp pull"


def collect(
    session: Session, runner: Runner, settings: Config, job_id: str, ended: Mapping[int, str]
) -> Left:
    """Pull a job's outputs from every node, and return what is left there. Failures are in what it returns.

    `ended` are the nodes whose instances have ended, as AWS says; their files are lost.
    """
    from cloudddp import job, outputs
    from cloudddp.cluster import PROJECT
    from cloudddp.text import one_line

    to = session.root / job.RESULTS / job_id
    lines: list[str] = []
    try:
        seen = outputs.look(runner, settings.job, project=PROJECT, job_id=job_id, again=True)
        lines += _unseen(seen.errors, ended)
        zero = min((node for node, reply in seen.values.items() if reply.rank_zero), default=None)
        for node, reply in sorted(seen.values.items()):
            if why := _bring(runner, settings, node, reply, to if node == zero else to / f"node{node}"):
                lines.append(f"node {node}: results were not pulled: {one_line(why, 500)}")
    except KeyboardInterrupt:
        return Left((*lines, "interrupted while results were pulled: some of them are missing"))
    if not any(one.outputs.files for reply in seen.values.values() for one in reply.jobs):
        note(f"no results: the job wrote nothing to {', '.join(settings.job.outputs)} (job.outputs)")
    held = [one for one in outputs.held(seen.values) if one.others or not one.complete]
    return Left((*lines, *map(line_of, held)), pull_line(held, seen.values))


def _unseen(errors: Mapping[int, Exception], ended: Mapping[int, str]) -> list[str]:
    lines = []
    for node, error in sorted(errors.items()):
        if node in ended:
            note(f"warning: node {node} has ended, and its files are lost")
        else:
            lines.append(f"node {node} did not answer, so its files are unknown: {error}")
    return lines


def _bring(runner: Runner, settings: Config, node: int, reply: NewReply, to: Path) -> str:
    """Pull the outputs of one node where there are new ones; return why that failed, or ''.

    Asked for by the names in our own settings: those in the node's answer are the node's choice.
    """
    from cloudddp import outputs, results
    from cloudddp.cluster import PROJECT
    from cloudddp.errors import CloudDDPError

    if not any(one.outputs.files for one in reply.jobs):
        return ""
    try:
        there = outputs.names_of(one.outputs for one in reply.jobs)
        names = [name for name in settings.job.outputs if os.path.normpath(name) in there]
        names = names or list(settings.job.outputs)
        pulled = results.pull(runner, names, node=node, to=to)
        for line in pulled.notes:
            note(f"warning: node {node}: {line}")
        note(f"node {node}: {counted(pulled.files, 'file')}, {size_of(pulled.size)}, brought to {to}")
        outputs.mark(runner, node, names, reply.at, project=PROJECT)
    except (CloudDDPError, OSError) as error:
        return str(error)
    return ""


def report_new(runner: Runner, settings: Config, job_id: str) -> None:
    """Report, at the end of a launch, which results `pull` will bring and which new files it will not. Never fails."""
    from cloudddp import outputs
    from cloudddp.cluster import PROJECT

    report_held(outputs.look(runner, settings.job, project=PROJECT, job_id=job_id).values, settings)


def report_held(replies: Mapping[int, NewReply], settings: Config) -> None:
    """Report what the nodes hold that nobody has pulled, and the command that pulls it."""
    from cloudddp import outputs

    held = outputs.held(replies)
    if results := [one for one in held if one.outputs]:
        elsewhere = any(not replies[one.node].rank_zero for one in results)
        listed = ", ".join(f"node {one.node}: {outputs.described(one.outputs)}" for one in results)
        note(f"results: {listed}; next: cloudddp pull{' --all-nodes' if elsewhere else ''}")
    if not (others := [one for one in held if one.others]):
        return
    names = [*settings.job.outputs, *dict.fromkeys(name for one in others for name in one.names)]
    note(
        f"warning: `pull` does not bring files outside job.outputs = {toml(settings.job.outputs)}: "
        + "; ".join(map(line_of, others))
    )
    note(
        f"  {pull_line(others, replies)} brings it; or set outputs = {toml(names)} in [job] of cloudddp.toml"
    )


def line_of(held: Held) -> str:
    """Return what one node holds outside the outputs, for a person."""
    from cloudddp import outputs

    rest = "" if held.complete else "; there are too many files to check them all"
    return f"node {held.node}: {outputs.described(held.others) or 'files'}{rest}"


def pull_line(held: list[Held], replies: Mapping[int, NewReply], *, outputs: bool = False) -> str:
    """Return the command that pulls these files: from the node of rank 0, which is the default, or from all nodes.

    `outputs`: with those inside the outputs, which a pull without names would bring. The names are a node's own, and
    the user will type them: `--` keeps them from being options, and a name that a terminal would not show unchanged
    is left out.
    """
    from cloudddp.outputs import names_of

    found = [(*one.outputs, *one.others) if outputs else one.others for one in held]
    names = dict.fromkeys(name for one in found for name in names_of(one) if _can_be_typed(name))
    elsewhere = any(not replies[one.node].rank_zero for one in held)
    words = ["cloudddp pull", *(["--all-nodes"] if elsewhere else [])]
    if any(name.startswith("-") for name in names):
        words.append("--")
    return " ".join([*words, *map(shlex.quote, names)])


def _can_be_typed(name: str) -> bool:
    from cloudddp import safe_names
    from cloudddp.text import one_line

    try:
        parts = safe_names.asked([name])
    except ValueError:
        return False
    return one_line(name) == name and not any(safe_names.guarded(part) for path in parts for part in path)
