"""Sharded checkpoints: checkpoints of several files, which often several nodes write.

Files of two saves in one folder may load without an error, and the weights are those of neither. So a folder
is complete only if a single attempt of a single job has written all its shards. Only the order within an
attempt is decided by time: torch.distributed.checkpoint writes `.metadata` last (FileSystemWriter.finish), so
a shard that is later belongs to a save that has not ended. The clocks of nodes differ: if the order is not
certain, the shard counts as later.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import (
    MAX_SIZE,
    Count,
    OptionalJobId,
    PathText,
    ProtocolError,
    at_most,
    within,
)
from cloudddp.agent.protocol.frozen import frozen

METADATA, SHARD = ".metadata", ".distcp"
MAX_PARTS = 100
MAX_PROBLEM = 500
MAX_FILES = 10_000  # in one folder
STEP = re.compile(r"(checkpoint|ckpt|step|epoch|global_step)[-_]?\d+", re.IGNORECASE)
INDEX = (".safetensors.index.json", ".bin.index.json")
# One file per rank, or one of N: rng_state_0.pth, mp_rank_00_model_states.pt, model-1-of-2.safetensors.
_NUMBERED = re.compile(
    r"(?:rank[_-]?(\d+)|rng_state_(\d+)|(\d+)-of-(\d+))[^/]*\.(?:pt|pth|ckpt|bin|safetensors)"
)

Writer = tuple[str, int]  # job and attempt
UNKNOWN: Writer = ("", 0)


def _check_inside(name: str, text: str) -> None:
    if text.startswith("/") or ".." in text.split("/"):
        raise ProtocolError(f"{name} leaves the project")


ProjectPath = Annotated[PathText, _check_inside]
_Names = Annotated[tuple[ProjectPath, ...], at_most(MAX_FILES)]
_Time = Annotated[int, within(-MAX_SIZE, MAX_SIZE)]
_Times = Annotated[dict[str, _Time], at_most(MAX_FILES)]


@frozen
class Part:
    """The files of one sharded checkpoint on one node. `names`: paths below `folder`; but `older` are shards
    there of another save. `job` and `attempt` wrote the shards ('': unknown), the last file at `written`
    (ctime, ns). `problem`: why they are not of one save; `mixed`: they are of two. `lacking`: shards that
    `.metadata` names, or files of ranks that other nodes have reported, and the node does not have.

    By folder below this one, `shards` and `metadata` are when this node wrote the last shard and `.metadata`:
    the earlier of mtime and ctime, in ns. `ahead`: by how much the clock of this node is ahead of those of
    others at most, by their numbers, in ns. `unfinished`: it is the newest of its attempt, which has not
    succeeded."""

    folder: ProjectPath
    names: _Names = ()
    job: OptionalJobId = ""
    attempt: Count = 0
    older: _Names = ()
    written: _Time = 0
    problem: Annotated[str, at_most(MAX_PROBLEM)] = ""
    mixed: bool = False
    lacking: _Names = ()
    shards: _Times = field(default_factory=dict)
    metadata: _Times = field(default_factory=dict)
    ahead: _Times = field(default_factory=dict)
    unfinished: bool = False

    @property
    def writer(self) -> Writer:
        return self.job, self.attempt


def is_shard(name: str) -> bool:
    """Whether a file, by its name, may be one of a sharded checkpoint. Pure."""
    name = posixpath.basename(name)
    return name == METADATA or name.endswith(SHARD) or bool(_NUMBERED.search(name))


def is_sharded(names: Iterable[str]) -> bool:
    """Whether files make a sharded checkpoint. A name with a rank may be adapter_rank8.pt: if ranks wrote
    them, one is of rank 0. Pure."""
    numbers = [_NUMBERED.search(posixpath.basename(name)) for name in filter(is_shard, names)]
    return any(number is None or int(number[1] or 0) == 0 for number in numbers)


def kind_of(name: str) -> str:
    """Return the name of a shard without its number. Pure."""
    last = posixpath.basename(name)
    match = _NUMBERED.search(last)
    if match is None:
        return SHARD if is_shard(name) else last
    group = next(at for at in (1, 2, 3) if match[at] is not None)
    return f"{last[: match.start(group)]}*{last[match.end(group) :]}"


def is_dedicated(folder: str, names: Collection[str]) -> bool:
    """Whether a folder with files of these names is a sharded checkpoint: that of a step with shards, that of
    torch.distributed.checkpoint, or one with shards of one kind and nothing else but their index. Pure."""
    if STEP.fullmatch(posixpath.basename(folder)) or any(kind_of(name) == SHARD for name in names):
        return any(map(is_shard, names))
    kinds = {kind_of(name) for name in names if not name.endswith(INDEX)}
    return len(kinds) == 1 and any(map(is_shard, names))


def checkpoint_of(folder: str) -> str:
    """Return the folder of the checkpoint to which the shards in a folder belong: the topmost one with the
    number of a step, or itself. Pure."""
    parts = folder.split("/")
    steps = [at for at, part in enumerate(parts) if STEP.fullmatch(part)]
    return "/".join(parts[: steps[0] + 1]) if steps else folder


def folder_of(path: str, known: Collection[str]) -> Optional[str]:
    """Return the folder of the sharded checkpoint, one of the `known` ones, to which a file belongs; None for
    any other file. Pure."""
    folder = checkpoint_of(posixpath.dirname(path))
    is_step = STEP.fullmatch(posixpath.basename(folder))
    return folder if folder in known and (is_step or is_shard(path) or path.endswith(INDEX)) else None


def writer_of(path: str, parts: Iterable[Part]) -> Writer:
    """Return who wrote a file of one of these checkpoints; UNKNOWN for any other file. Pure."""
    known = {part.folder: part for part in parts}
    folder = folder_of(path, known)
    return known[folder].writer if folder in known else UNKNOWN


def named_in(metadata: bytes) -> set[str]:
    """Return the names of the shards in the bytes of a `.metadata`: a pickle, which is not loaded, since
    loading runs what a program wrote. Pure."""
    return {one.decode() for one in re.findall(rb"__\d{1,9}_\d{1,9}\.distcp", metadata)}


def title(job: str, attempt: int) -> str:
    if not job:
        return "unknown origin"
    return f"job {job}" + (f" after restart {attempt}" if attempt else "")


def listed(names: Iterable[str]) -> str:
    """Return the first name, and how many more there are."""
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first


class Checkpoints:
    """The sharded checkpoints on some nodes. `parts`: folder -> node -> part; `problems`: folder -> why it is
    not complete, or ''. Pure."""

    def __init__(self, parts: Mapping[int, Iterable[Part]]) -> None:
        self.parts: dict[str, dict[int, Part]] = {}
        for node, ones in sorted(parts.items()):
            for one in ones:
                self.parts.setdefault(one.folder, {})[node] = one
        self.problems = {folder: problem(found) for folder, found in self.parts.items()}

    def holders(self, folder: str) -> set[int]:
        """Return the nodes with files of the newest attempt that has written there; others have older
        ones."""
        return set(_newest(self.parts[folder]))

    def written_by(self, job: str) -> Checkpoints:
        """Return the checkpoints whose newest save is of this job."""
        own = Checkpoints({})
        for folder, parts in self.parts.items():
            if max(part.writer for part in parts.values())[0] == job:
                own.parts[folder], own.problems[folder] = parts, self.problems[folder]
        return own

    def changed(self, after: Checkpoints) -> list[str]:
        """Return the folders in which a node has written since."""
        return [
            folder
            for folder, parts in self.parts.items()
            for node, now in after.parts.get(folder, {}).items()
            if node in parts and (now.names, now.written) != (parts[node].names, parts[node].written)
        ]

    def is_leftover(self, folder: str) -> bool:
        """Whether an incomplete checkpoint needs no word: a newer one is complete, since scripts delete
        old ones on some nodes only; or it has another name than a complete one beside it and no
        `.metadata`, since scripts save in a folder that they rename."""
        if not self.problems[folder]:
            return False
        if newest := newest_complete(folder, self.problems):
            return _numbers(newest) > _numbers(folder)
        names = [posixpath.basename(name) for part in self.parts[folder].values() for name in part.names]
        beside = [posixpath.dirname(one) for one, why in self.problems.items() if not why]
        is_begun = METADATA not in names and any(name.endswith(SHARD) for name in names)
        return is_begun and posixpath.dirname(folder) in beside

    def incomplete(self) -> list[str]:
        return [one for one, why in self.problems.items() if why and not self.is_leftover(one)]

    def superseded(self) -> list[str]:
        """Return the incomplete folders that an older one with a lower number can replace."""
        return [one for one in self.incomplete() if newest_complete(one, self.problems)]

    def blocking(self, nodes: Collection[int], *, fresh: bool = False) -> list[str]:
        """Return the other incomplete folders, with which ranks on these `nodes` must not begin: those
        that the last job to write any has written. A `fresh` job may write over what is incomplete. Where
        it is only not known whether a save has ended, each node may go on with what it has, unless each
        rank has a file."""
        last = max((part.job for parts in self.parts.values() for part in parts.values()), default="")
        found = []
        for folder in self.incomplete():
            parts = self.parts[folder]
            of_ranks = any(is_of_rank(name) for part in parts.values() for name in part.names)
            known = {node: replace(part, unfinished=of_ranks) for node, part in parts.items()}
            is_needed = not fresh and (of_ranks or problem(known) or not parts.keys() >= set(nodes))
            is_last = last in [part.job for part in parts.values()]
            if is_last and (is_needed or any(part.mixed for part in parts.values())):
                found.append(folder)
        return [one for one in found if one not in self.superseded()]


def refusal(folder: str, problems: Mapping[str, str]) -> str:
    """Return that a checkpoint is not complete, why, and which other one is. Pure."""
    newest = newest_complete(folder, problems)
    others = f"the newest complete one is {newest}" if newest else "no other one can replace it"
    return f"{folder or 'the project'} is not a complete checkpoint: {problems[folder]}; {others}"


def newest_complete(folder: str, problems: Mapping[str, str]) -> str:
    """Return the complete checkpoint with the highest number whose path is otherwise the same, or ''.
    Pure."""

    def series(one: str) -> tuple[str, str]:
        return posixpath.dirname(one), re.sub(r"\d+", "#", posixpath.basename(one))

    others = [one for one, why in problems.items() if not why and series(one) == series(folder)]
    return max(others, key=_numbers, default="")


def _numbers(folder: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", posixpath.basename(folder))]


def is_of_rank(name: str) -> bool:
    """Whether a file is one of those that each rank writes, by its name. Pure."""
    match = _NUMBERED.search(posixpath.basename(name))
    return match is not None and match[1] is not None


def _newest(parts: Mapping[int, Part]) -> dict[int, Part]:
    newest = max(part.writer for part in parts.values())
    return {node: part for node, part in sorted(parts.items()) if part.writer == newest}


def problem(parts: Mapping[int, Part]) -> str:
    """Return why what the nodes have of a folder is not one complete checkpoint, or ''. Pure."""
    newest = _newest(parts)
    have = {name for part in newest.values() for name in part.names}
    if not is_sharded(have):
        return ""
    for node, part in newest.items():
        if part.problem:
            return f"node {node}: {part.problem}"
    needed = {name for part in newest.values() for name in part.lacking}
    needed |= {posixpath.join(folder, METADATA) for part in newest.values() for folder in part.shards}
    if lost := needed - have:
        return _lost(lost, parts, newest)
    if why := _gap(have) or _later(newest):
        return why
    alone = any(len(part.names) == len(have) for part in newest.values())
    unordered = not any(posixpath.basename(name) == METADATA for name in have)
    if unordered and not alone and any(part.unfinished for part in newest.values()):
        writer = title(*next(iter(newest.values())).writer)
        return f"{writer} has not succeeded, and this is its newest save, which may not have ended"
    return ""


def _lost(lost: set[str], parts: Mapping[int, Part], newest: Mapping[int, Part]) -> str:
    older = [
        f"; node {node} has "
        + (f"what {title(*part.writer)} wrote" if part.job else "files of unknown origin")
        for node, part in parts.items()
        if node not in newest and lost.intersection(part.names)
    ]
    writer = title(*next(iter(newest.values())).writer)
    return f"{listed(lost)} of {writer} {'are' if len(lost) > 1 else 'is'} missing{''.join(older[:1])}"


def _gap(have: Iterable[str]) -> str:
    """Return which number is missing among files of one kind. How many ranks there were is not known."""
    found: dict[str, tuple[set[int], int]] = {}
    for name in have:
        match = _NUMBERED.search(posixpath.basename(name))
        if match and match[1] is None:
            kind = posixpath.join(posixpath.dirname(name), kind_of(name))
            found.setdefault(kind, (set(), int(match[4] or 0)))[0].add(int(match[2] or match[3]))
    for kind, (numbers, of) in sorted(found.items()):
        expected = of or max(numbers) + 1
        if len(numbers) < expected:
            return f"of {kind} there are {len(numbers)} of {expected}"
    return ""


def _later(newest: Mapping[int, Part]) -> str:
    """Return which node wrote shards that another one lacks after that wrote `.metadata`, or may have."""
    for node, part in newest.items():
        for folder, written in part.metadata.items():
            for other, one in newest.items():
                if folder not in one.shards or not set(part.lacking).intersection(one.names):
                    continue
                ahead = part.ahead.get(str(other))
                if ahead is None:
                    return f"the clocks of nodes {node} and {other} were not compared"
                if one.shards[folder] + ahead > written:
                    return f"node {other} wrote shards after node {node} wrote {METADATA}, or may have"
    return ""
