"""Fetches results that the nodes have copied to Amazon S3, with the rules of a pull from a node.

Any program on a node could write there with the role of the node: names are checked as those of a node are,
nothing is written through a link, and a file that is newer on this computer stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cloudddp.agent.protocol.checkpoints import Checkpoints
from cloudddp.agent.protocol.codec import MAX_TIME, ProtocolError
from cloudddp.agent.protocol.copies import LINK, LOGS, MTIME, OUTPUTS, REPORT, Copied
from cloudddp.agent.protocol.manifest import FILE
from cloudddp.agent.protocol.manifest import LINK as LINK_ENTRY
from cloudddp.agent.replies import decode
from cloudddp.aws import s3
from cloudddp.aws.client import AWS
from cloudddp.aws.s3 import Object
from cloudddp.files import Folder
from cloudddp.job.launch_record import S3Place
from cloudddp.job.results import incoming, pull, safe_names
from cloudddp.job.results.pull import Pulled
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import Entry, Notes, Refused, Unpack, cannot_write, local_time

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


def find(aws: AWS, place: S3Place) -> dict[int, NodeObjects]:
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


def _report(aws: AWS, place: S3Place, key: str) -> Copied | None:
    data = s3.read(aws, place.bucket, key, MAX_REPORT)
    try:
        return decode(data, Copied, limit=MAX_REPORT)
    except ProtocolError:
        return None


def fetch(
    aws: AWS,
    place: S3Place,
    found: Mapping[str, Object],
    names: Sequence[str],
    *,
    node: int,
    to: Path,
    known: Checkpoints | None = None,
) -> Pulled:
    """Copy those objects (by path) that lie below `names` into the folder `to`. Raises as pull.pull does, and
    AWSError, with nothing moved."""
    roots = pull.check_names(names)
    pull.check_target(to)
    notes = Notes()
    chosen = {name: one for name, one in sorted(found.items()) if _is_requested(name, roots)}
    if not chosen:
        return Pulled(0, 0, ())
    folder = incoming.name_of("s3", place.bucket, place.prefix, str(node))
    with pull.target_folder(to) as target, incoming.incoming(target, folder, keeps=False) as arrived:
        try:
            with Unpack(arrived.files, roots, notes, node) as unpack:
                metadata = s3.download(aws, place.bucket, _files(chosen, arrived.before, unpack))
                placing = _Placing(unpack, notes, arrived.before, target)
                for number, (name, one) in enumerate(chosen.items()):
                    placing.place(number, _entry(name, one, metadata.get(one.key, {})))
            moved = incoming.move_results(arrived.files, target, notes, known or Checkpoints({}), node=node)
        except OSError as error:
            raise cannot_write(to, error) from None
    return Pulled(
        moved.files,
        moved.size,
        notes.lines(),
        left=notes.left,
        incomplete=tuple(moved.incomplete),
    )


def _is_requested(name: str, roots: Sequence[Parts]) -> bool:
    try:
        return safe_names.covers(roots, safe_names.split(name))
    except ValueError:
        return True  # it is reported as left out


def _files(chosen: Mapping[str, Object], folder: Folder, unpack: Unpack) -> Iterator[tuple[Object, BinaryIO]]:
    """Yield the objects that are downloaded, each with a file named by its number."""
    for number, (name, one) in enumerate(chosen.items()):
        if _is_written(name):
            unpack.check_space(folder, name, one.size)
            yield one, os.fdopen(folder.create(str(number), 0o644), "wb")


def _is_written(name: str) -> bool:
    try:
        path = safe_names.split(name)
    except ValueError:
        return False
    return not (any(map(safe_names.guarded, path)) or safe_names.too_long(path))


def _entry(name: str, one: Object, metadata: Mapping[str, str]) -> Entry:
    """Return what a file or a link is placed as: without a size, because its contents are here."""
    text = metadata.get(MTIME, "")
    mtime = (
        min(int(text), int(MAX_TIME) * 10**9) if text.isascii() and text.isdigit() and len(text) < 30 else 0
    )
    link = metadata.get(LINK, "") if not one.size else ""
    return Entry(name, LINK_ENTRY if link else FILE, 0, 0o644, mtime, link)


@dataclass
class _Placing:
    """Moves files that have been downloaded to `folder` to their paths among those that are unpacked."""

    unpack: Unpack
    notes: Notes
    folder: Folder
    target: Folder

    def place(self, number: int, entry: Entry) -> None:
        if entry.mtime_ns and self._is_newer_here(entry):
            self.notes.left_out(entry.name, "the file on this computer is newer", counts=False)
            return
        try:
            self.unpack.begin(entry)
        except Refused as error:
            self.notes.left_out(entry.name, str(error))
            return
        if self.unpack.writes:
            self.unpack.end(0)  # the empty file, which the one that was downloaded replaces
            path, source = safe_names.split(entry.name), self.folder.descriptor
            moment = local_time(entry.mtime_ns)
            os.utime(str(number), ns=(moment, moment), dir_fd=source, follow_symlinks=False)
            to = self.unpack.parent(path).descriptor
            os.rename(str(number), path[-1], src_dir_fd=source, dst_dir_fd=to)

    def _is_newer_here(self, entry: Entry) -> bool:
        try:
            parts = safe_names.split(entry.name)
            return self.target.path.joinpath(*parts).lstat().st_mtime_ns > entry.mtime_ns
        except (OSError, ValueError):
            return False
