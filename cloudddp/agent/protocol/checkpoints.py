"""Folders of shards: checkpoints of several files, which often several nodes write.

Files of two saves in one such folder load without an error, and the weights are those of neither. So a
folder is one checkpoint only if a single attempt of a single job has written all of it. Times decide nothing
but the order within an attempt: torch.distributed.checkpoint writes `.metadata` last
(FileSystemWriter.finish), so a shard that is later belongs to a save that has not ended. Clocks of nodes
differ: what cannot be told counts as later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_NAME, MAX_PATH, MAX_SIZE, check_length, check_range
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_INSTANCE_ID

METADATA, SHARD = ".metadata", ".distcp"
MAX_PARTS = 100
MAX_DOUBT = 500
MAX_FILES = 10_000  # in one folder
STEP = re.compile(r"(checkpoint|ckpt|step|epoch|global_step)[-_]?\d+", re.IGNORECASE)
_INDEX = (".safetensors.index.json", ".bin.index.json")  # it names the files of a sharded model
# One file per rank, or one of N: rng_state_0.pth, mp_rank_00_model_states.pt, model-1-of-2.safetensors.
_NUMBERED = re.compile(
    r"(?:rank[_-]?(\d+)|rng_state_(\d+)|(\d+)-of-(\d+))[^/]*\.(?:pt|pth|ckpt|bin|safetensors)"
)


Writer = tuple[str, int]  # job and attempt
UNKNOWN: Writer = ("", 0)


@frozen
class Part:
    """What one node has of a folder of shards; `names` are paths below it. `job` and `attempt` have written
    it ('': unknown). `doubt`: why it is not of one save as far as this node can tell; `mixed`: because it has
    files of several. `named`: the shards that `.metadata` or an index names.

    By folder below this one, `shards` and `metadata` are when this node wrote the last shard and `.metadata`
    (ns, its clock); `ahead`: by how much its clock is ahead of those of other instances at most (ns).
    `unfinished`: it is the newest of its attempt, which has not succeeded."""

    folder: str
    names: tuple[str, ...] = ()
    job: str = ""
    attempt: int = 0
    doubt: str = ""
    mixed: bool = False
    named: tuple[str, ...] = ()
    shards: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    unfinished: bool = False

    def __post_init__(self) -> None:
        check_length("folder", self.folder, MAX_PATH)
        check_length("job", self.job, MAX_NAME)
        check_range("attempt", self.attempt, 0, MAX_COUNT)
        check_length("doubt", self.doubt, MAX_DOUBT)
        check_length("names", self.names, MAX_FILES)
        check_length("named", self.named, MAX_FILES)
        for name in (*self.names, *self.named):
            check_length("a name", name, MAX_PATH)
        for times in (self.shards, self.metadata, self.ahead):
            check_length("times", times, MAX_FILES)
            for time in times.values():
                check_range("a time", abs(time), 0, MAX_SIZE)
        for instance in self.ahead:
            check_length("an instance", instance, MAX_INSTANCE_ID)

    @property
    def writer(self) -> Writer:
        return self.job, self.attempt

    @property
    def is_folder(self) -> bool:
        """Whether the folder is the checkpoint, and has nothing else."""
        has_shards = METADATA in self.names or any(name.endswith(SHARD) for name in self.names)
        return has_shards or bool(STEP.fullmatch(self.folder.rpartition("/")[2]))


def is_shard(name: str) -> bool:
    """Whether a file, by its name, is one of several that make a checkpoint together. Pure."""
    name = name.rpartition("/")[2]
    return name == METADATA or name.endswith((SHARD, *_INDEX)) or bool(_NUMBERED.search(name))


def unit_of(folder: str) -> str:
    """Return the checkpoint to which the shards in a folder belong: the topmost folder with the number of a
    step, or the folder itself. Pure."""
    parts = folder.split("/")
    steps = [at for at, part in enumerate(parts) if STEP.fullmatch(part)]
    return "/".join(parts[: steps[0] + 1]) if steps else folder


def folder_of(path: str, known: Collection[str] = ()) -> Optional[str]:
    """Return the folder of the checkpoint of several files to which a file belongs; None for any other file.
    In the folder of a step every file belongs to it if it is one of the `known` ones. Pure."""
    unit = unit_of(path.rpartition("/")[0])
    return unit if is_shard(path) or (unit in known and STEP.fullmatch(unit.rpartition("/")[2])) else None


def writer_of(path: str, parts: Iterable[Part]) -> Writer:
    """Return who wrote a file of one of these checkpoints; UNKNOWN for any other file. Pure."""
    known = {one.folder: one for one in parts}
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
    """What nodes have of checkpoints of several files. `ids` are the instances of all nodes of the job or the
    cluster. `parts`: folder -> node -> part; `doubts`: folder -> why it is not whole, or ''. Pure."""

    def __init__(self, parts: Mapping[int, Iterable[Part]], ids: Mapping[int, str]) -> None:
        self._ids = ids
        self.parts: dict[str, dict[int, Part]] = {}
        for node, ones in sorted(parts.items()):
            for one in ones:
                self.parts.setdefault(one.folder, {})[node] = one
        self.doubts = {folder: doubt(found, ids) for folder, found in self.parts.items()}

    def holders(self, folder: str) -> set[int]:
        """Return the nodes with files of the newest attempt that has written there: what others have is a
        remnant."""
        return _holders(self.parts[folder])

    def of(self, node: int) -> tuple[dict[str, Part], list[str]]:
        """Return what a node has of checkpoints that are whole, by folder, and the folders of all others and
        of remnants."""
        here = [folder for folder, parts in self.parts.items() if node in parts]
        whole = [one for one in here if not self.doubts[one] and node in self.holders(one)]
        return {one: self.parts[one][node] for one in whole}, [one for one in here if one not in whole]

    def superseded(self) -> list[str]:
        """Return the folders that are not whole and have a whole one beside them, with another number."""
        return [one for one in self._broken() if whole_beside(one, self.doubts)]

    def _broken(self) -> list[str]:
        """Return the folders that are not whole. Files of a model that lie among others may have been
        downloaded by several jobs."""
        return [
            folder
            for folder, why in self.doubts.items()
            if why and any(part.is_folder for part in self.parts[folder].values())
        ]

    def blocking(self, nodes: Collection[int], *, fresh: bool = False) -> list[str]:
        """Return the other folders that are not whole and with which ranks on these `nodes` must not begin:
        those that the last job to write any has written. A `fresh` job may write over what is incomplete.
        Where it is only not known whether a save has ended, each node may go on with what it has."""
        last = max((part.job for parts in self.parts.values() for part in parts.values()), default="")
        found = []
        for folder in self._broken():
            parts = self.parts[folder]
            if last not in [part.job for part in parts.values()]:
                continue
            known = {node: replace(part, unfinished=False) for node, part in parts.items()}
            is_needed = not fresh and (doubt(known, self._ids) or not parts.keys() >= set(nodes))
            if is_needed or any(part.mixed for part in parts.values()):
                found.append(folder)
        return [one for one in found if not whole_beside(one, self.doubts)]

    def refusal(self, folder: str) -> str:
        """Return that a checkpoint is not whole, why, and which one beside it is."""
        return refusal(folder, self.doubts)


NO_CHECKPOINTS = Checkpoints({}, {})


def refusal(folder: str, doubts: Mapping[str, str]) -> str:
    """As Checkpoints.refusal. Pure."""
    newest = whole_beside(folder, doubts)
    instead = f"the newest whole one is {newest}" if newest else "there is no whole one beside it"
    return f"{folder} is no whole checkpoint: {doubts[folder]}; {instead}"


def whole_beside(folder: str, doubts: Mapping[str, str]) -> str:
    """Return the whole checkpoint with the highest number whose name is otherwise the same, or ''. Pure."""
    beside = [one for one, why in doubts.items() if not why and _series(one) == _series(folder)]
    return max(beside, key=lambda one: [int(number) for number in re.findall(r"\d+", one)], default="")


def _holders(parts: Mapping[int, Part]) -> set[int]:
    newest = max(part.writer for part in parts.values())
    return {node for node, part in parts.items() if part.writer == newest}


def doubt(parts: Mapping[int, Part], ids: Mapping[int, str]) -> str:
    """Return why what the nodes have of a folder is not one whole checkpoint, or ''. Pure."""
    own = {node: parts[node] for node in sorted(_holders(parts))}
    have = {name for part in own.values() for name in part.names}
    if not is_one(have):
        return ""
    for node, part in own.items():
        if part.doubt:
            return f"node {node}: {part.doubt}"
    needed = {name for part in own.values() for name in part.named}
    needed |= {_join(folder, METADATA) for part in own.values() for folder in part.shards}
    if lost := needed - have:
        return _lost(lost, parts, own)
    if why := _gap(have) or _later(own, ids):
        return why
    alone = any(len(part.names) == len(have) for part in own.values())
    if len(ids) > 1 and not alone and any(part.unfinished for part in own.values()):
        return f"{title(*next(iter(own.values())).writer)} has not succeeded, and wrote nothing after it"
    return ""


def _lost(lost: set[str], parts: Mapping[int, Part], own: Mapping[int, Part]) -> str:
    older = [
        f"; node {node} has what {title(*part.writer)} wrote"
        for node, part in parts.items()
        if node not in own and lost.intersection(part.names)
    ]
    writer = title(*next(iter(own.values())).writer)
    return f"{listed(lost)} of {writer} {'are' if len(lost) > 1 else 'is'} missing{''.join(older)}"


def is_one(names: Iterable[str]) -> bool:
    """Whether files make a checkpoint together. One whose name has a rank may be adapter_rank8.pt: of such
    files, one has rank 0. Pure."""
    for name in names:
        match = _NUMBERED.search(name.rpartition("/")[2])
        if is_shard(name) and (match is None or match[1] is None or int(match[1]) == 0):
            return True
    return False


def _gap(have: Iterable[str]) -> str:
    """Return which number is missing among files of one kind. How many ranks there were is not known."""
    found: dict[str, tuple[set[int], int]] = {}
    for name in have:
        match = _NUMBERED.search(name.rpartition("/")[2])
        if match and match[1] is None:
            number, of = (match[2], 0) if match[2] else (match[3], int(match[4]))
            kind = name.replace(number, "*", 1)
            found.setdefault(kind, (set(), of))[0].add(int(number))
    for kind, (numbers, of) in sorted(found.items()):
        expected = of or max(numbers) + 1
        if len(numbers) < expected:
            return f"of {kind} there are {len(numbers)} of {expected}"
    return ""


def _later(own: Mapping[int, Part], ids: Mapping[int, str]) -> str:
    """Return which node wrote shards that another one lacks after that wrote `.metadata`, or may have."""
    for node, part in own.items():
        lacking = set(part.named).difference(part.names)
        for folder, written in part.metadata.items():
            for other, one in own.items():
                if folder not in one.shards or not lacking.intersection(one.names):
                    continue
                ahead = part.ahead.get(ids.get(other, ""))
                if ahead is None:
                    return f"the clocks of nodes {node} and {other} were not compared"
                if one.shards[folder] + ahead > written:
                    return f"node {other} wrote shards after node {node} wrote {METADATA}, or may have"
    return ""


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _series(folder: str) -> str:
    return re.sub(r"\d+", "#", folder)
