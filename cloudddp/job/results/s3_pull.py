"""Fetches results that the nodes have copied to Amazon S3, with the rules of a pull from a node.

Any program on a node could write there with the role of the node: names are checked as those of a node are,
nothing is written through a link, and a file that is newer on this computer stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent.decode import decode
from cloudddp.agent.protocol.codec import MAX_TIME, ProtocolError
from cloudddp.agent.protocol.copies import LINK, LOGS, MTIME, OUTPUTS, REPORT, Copied
from cloudddp.agent.protocol.manifest import FILE
from cloudddp.agent.protocol.manifest import LINK as LINK_ENTRY
from cloudddp.aws import s3
from cloudddp.aws.client import AWS
from cloudddp.aws.s3 import Object
from cloudddp.job.results import incoming, pull, safe_names
from cloudddp.job.results.move import Move
from cloudddp.job.results.pull import Pulled
from cloudddp.job.results.pull_notes import Notes
from cloudddp.job.results.s3_location import Place
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import Entry, Refused, Unpack
from cloudddp.job.results.write_errors import cannot_write
from cloudddp.safe_files import Folder

MAX_REPORT = 1 << 18  # bytes of a node's report
_NAME = re.compile(
    rf"node-(0|[1-9][0-9]{{0,3}})/(?:({OUTPUTS}|{LOGS})/(.+)|({re.escape(REPORT)}))", re.DOTALL
)


@dataclass
class NodeObjects:
    """What a node has copied: the objects of its outputs and logs by their paths, and its report, as far as
    it made one."""

    outputs: dict[str, Object] = field(default_factory=dict)
    logs: dict[str, Object] = field(default_factory=dict)
    report: Copied | None = None

    @property
    def size(self) -> int:
        return sum(one.size for one in (*self.outputs.values(), *self.logs.values()))


def find(aws: AWS, place: Place) -> dict[int, NodeObjects]:
    """Return what is in S3, by node. Raises AWSError, CloudDDPError."""
    found: dict[int, NodeObjects] = {}
    for one in s3.listed(aws, place.bucket, f"{place.prefix}/"):
        match = _NAME.fullmatch(one.key.removeprefix(f"{place.prefix}/"))
        if match is None:
            continue
        node = found.setdefault(int(match[1]), NodeObjects())
        if match[2] == OUTPUTS:
            node.outputs[match[3]] = one
        elif match[2] == LOGS:
            node.logs[match[3]] = one
        elif one.size <= MAX_REPORT:
            node.report = _report(aws, place, one.key)
    return dict(sorted(found.items()))


def _report(aws: AWS, place: Place, key: str) -> Copied | None:
    pieces: list[bytes] = []
    s3.read(aws, place.bucket, key, lambda _: True, pieces.append)
    try:
        return decode(b"".join(pieces), Copied, limit=MAX_REPORT)
    except ProtocolError:
        return None


def fetch(
    aws: AWS, place: Place, found: Mapping[str, Object], names: Sequence[str], *, node: int, to: Path
) -> Pulled:
    """Copy those objects (by path) that lie below `names` into the folder `to`. Raises as pull.pull does, and
    AWSError, with nothing moved."""
    roots = pull.check_names(names)
    pull.check_target(to)
    notes = Notes()
    chosen = {name: one for name, one in sorted(found.items()) if _is_requested(name, roots)}
    if not chosen:
        return Pulled(0, 0, 0, ())
    folder = incoming.name_of("s3", place.bucket, place.prefix, str(node))
    with pull.target_folder(to) as target, incoming.incoming(target, folder, keeps=False) as arrived:
        try:
            with Unpack(arrived.files, roots, notes, node) as unpack:
                for name, one in chosen.items():
                    _Transfer(unpack, notes, target, name, one).run(aws, place)
            moved = Move(notes, since=0)
            moved.contents(arrived.files, target)
        except OSError as error:
            raise cannot_write(to, error) from None
    return Pulled(moved.files, moved.size, moved.older, notes.lines(), left=notes.left)


def _is_requested(name: str, roots: Sequence[Parts]) -> bool:
    try:
        return safe_names.covers(roots, safe_names.split(name))
    except ValueError:
        return True  # it is reported as left out


@dataclass
class _Transfer:
    """One object on its way into a folder."""

    unpack: Unpack
    notes: Notes
    target: Folder
    name: str
    one: Object

    def run(self, aws: AWS, place: Place) -> None:
        self._open, self._mtime_ns = False, 0
        s3.read(aws, place.bucket, self.one.key, self._begin, lambda data: self.unpack.data(memoryview(data)))
        if self._open:
            self.unpack.end(self._mtime_ns)

    def _begin(self, metadata: Mapping[str, str]) -> bool:
        """Return whether the contents are to be read."""
        text = metadata.get(MTIME, "")
        mtime = (
            min(int(text), int(MAX_TIME) * 10**9)
            if text.isascii() and text.isdigit() and len(text) < 30
            else 0
        )
        link = metadata.get(LINK, "") if not self.one.size else ""
        kind = LINK_ENTRY if link else FILE
        entry = Entry(self.name, kind, self.one.size, 0o644, mtime, link)
        if mtime and self._is_newer_here(mtime):
            self.notes.left_out(self.name, "the file on this computer is newer", counts=False)
            return False
        try:
            self.unpack.begin(entry)
        except Refused as error:
            self.notes.left_out(self.name, str(error))
            return False
        self._open, self._mtime_ns = not link, mtime
        return not link

    def _is_newer_here(self, mtime_ns: int) -> bool:
        try:
            parts = safe_names.split(self.name)
            return self.target.path.joinpath(*parts).lstat().st_mtime_ns > mtime_ns
        except (OSError, ValueError):
            return False
