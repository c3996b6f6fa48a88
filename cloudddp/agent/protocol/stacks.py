"""The stacks of ranks: `stacks`, and what a job's ranks wait for, in a sentence. Both sides make it: the
agents for the verdict of a stalled job, the laptop for `cloudddp stacks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import Count, JobId, PathText, ProjectName, at_most
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS
from cloudddp.agent.protocol.phases import Rank

MAX_WORD = 200  # characters of a function or of a file
MAX_STACK = 1 << 15  # characters of one rank's stacks
MAX_STACKS = 16 << 20  # bytes of a reply
MAX_TOOL = 1 << 26  # bytes of a program
TOOLS = ".cloudddp-tools"  # the project, as a transfer knows it, whose only file is py-spy
SHOWN_GROUPS = 6
MAX_SENTENCE = 1000  # characters of what NCCL or PyTorch has found
MAX_PACKED = 1 << 20  # characters of the dumps of one node
MAX_DUMPS = 60  # nodes whose dumps are analyzed: one request has them all

Word = Annotated[str, at_most(MAX_WORD)]


@frozen
class Position:
    """Where the main thread of a rank is. `waits` is the collective, or the function of CUDA, that it waits
    in; '' if it does something else. `function`, `file` and `line` are the innermost of the script's own;
    `inside` is the function of a library that was called there, with its file. `error`: why nothing is
    known."""

    rank: Rank
    waits: Word = ""
    function: Word = ""
    file: Word = ""
    line: Count = 0
    inside: Word = ""
    error: Word = ""


@frozen
class RankStack:
    """The stacks of a rank's threads, the main thread first, innermost frame first."""

    position: Position
    text: Annotated[str, at_most(MAX_STACK)]


@frozen
class StacksReply:
    """The stacks of the ranks that run on this node. `lacks_tool`: py-spy is missing there. `nccl`: what
    NCCL's RAS reports of all ranks, '' where it does not answer. `packed`: the dumps of PyTorch's flight
    recorder, '' for none. `conclusion`: of its analyzer, from the dumps of the request."""

    ranks: Annotated[tuple[RankStack, ...], at_most(MAX_RANKS)]
    lacks_tool: bool = False
    platform: Annotated[str, at_most(MAX_WORD)] = ""  # such as linux-x86_64
    nccl: Annotated[str, at_most(MAX_SENTENCE)] = ""
    packed: Annotated[str, at_most(MAX_PACKED)] = ""
    conclusion: Annotated[str, at_most(MAX_SENTENCE)] = ""


@frozen
class StacksRequest:
    """Read the stacks of a job's ranks on this node, and keep them in the job's folder. `install`: get py-spy
    with pip where it is missing. With `dumps`, those of all nodes, only analyze these with `python`, which is
    as for a probe."""

    job: JobId
    install: bool = True
    dumps: Annotated[tuple[str, ...], at_most(MAX_DUMPS)] = ()
    project: ProjectName = "project"
    python: PathText = ""

    STEP = "stacks"
    REPLY = StacksReply
    LIMIT = MAX_STACKS


def summary(positions: Iterable[Position]) -> str:
    """Return where the ranks are: `ranks 0, 1 and 3 wait in all_reduce (train.py:12); rank 2 is in load_batch
    (train.py:88)`. The largest group is the first; '' for no rank. Pure."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in sorted(positions, key=lambda one: one.rank):
        groups.setdefault(_what(one), []).append(one.rank)
    listed = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
    parts = [_part(verbs, where, ranks) for (verbs, where), ranks in listed[:SHOWN_GROUPS]]
    rest = sum(len(ranks) for _, ranks in listed[SHOWN_GROUPS:])
    return "; ".join(parts) + (f"; and {rest} more ranks elsewhere" if rest else "")


def _what(one: Position) -> tuple[str, str]:
    """Return (the verb, the place), which are equal for ranks that do the same."""
    place = f" ({one.file}:{one.line})" if one.file else ""
    if one.error:
        return "error", one.error
    if one.waits:
        return "wait", one.waits + place
    inside = f", inside {one.inside}" if one.inside else ""
    return "is", (one.function or "an unknown function") + place + inside


def _part(verb: str, where: str, ranks: list[int]) -> str:
    named = named_ranks(ranks)
    if verb == "error":
        return f"no stack of {named}: {where}"
    if verb == "wait":
        return f"{named} {'wait' if len(ranks) > 1 else 'waits'} in {where}"
    return f"{named} {'are' if len(ranks) > 1 else 'is'} in {where}"


def named_ranks(ranks: list[int]) -> str:
    """Return `rank 2`, or `ranks 0-3, 6 and 7`. They are in order."""
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    """Return `0-3, 6 and 7`: three and more that follow each other are a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def elsewhere(positions: Iterable[Position]) -> Optional[Position]:
    """Return the one rank that is not where the others are: it holds them up. None if there is not exactly
    one. Pure."""
    known = [position for position in positions if not position.error]
    busy = [one for one in known if not one.waits]
    if len(busy) == 1 and len(known) > 1:
        return busy[0]
    groups: dict[tuple[str, str], list[Position]] = {}
    for one in known:
        groups.setdefault(_what(one), []).append(one)
    sizes = sorted(groups.values(), key=len)
    return sizes[0][0] if len(sizes) == 2 and len(sizes[0]) == 1 < len(sizes[1]) else None
