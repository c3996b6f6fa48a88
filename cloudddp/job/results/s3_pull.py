"""Fetches results that the nodes have copied to Amazon S3, with the rules of a pull from a node: any program
there could write to S3, too."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent.protocol.checkpoints import Checkpoints
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.copies import LINK, LOGS, MTIME, OUTPUTS, REPORT, Copied, CopyPhase, Destination
from cloudddp.agent.protocol.manifest import FILE, Entry
from cloudddp.agent.protocol.manifest import LINK as SYMLINK
from cloudddp.agent.replies import decode
from cloudddp.aws import s3
from cloudddp.aws.client import AWS
from cloudddp.aws.s3 import S3Object
from cloudddp.job.results import incoming, pull, safe_names
from cloudddp.job.results.notes import Notes
from cloudddp.job.results.placing import Placing, Pulled

MAX_REPORT = 1 << 18  # bytes of a node's report
_NAME = re.compile(
    rf"node-(0|[1-9][0-9]{{0,3}})/(?:({OUTPUTS}|{LOGS})/(.+)|({re.escape(REPORT)}))", re.DOTALL
)
_NO_REPORT = Copied("", CopyPhase.COPYING)


@dataclass
class NodeObjects:
    """The objects of a node's outputs and logs by their paths, and its report, COPYING where it made none."""

    outputs: dict[str, S3Object] = field(default_factory=dict)
    logs: dict[str, S3Object] = field(default_factory=dict)
    report: Copied = _NO_REPORT


def find(aws: AWS, place: Destination) -> dict[int, NodeObjects]:
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
            with contextlib.suppress(ProtocolError):
                data = s3.read(aws, place.bucket, one.key, MAX_REPORT)
                node.report = decode(data, Copied, limit=MAX_REPORT)
    return dict(sorted(found.items()))


def fetch(
    aws: AWS,
    place: Destination,
    found: Mapping[str, S3Object],
    names: Sequence[str],
    *,
    node: int,
    to: Path,
    known: Checkpoints | None = None,
) -> Pulled:
    """Copy the objects below `names` into the folder `to`. Raises as pull.pull does, and AWSError."""
    roots = safe_names.requested(names)
    pull.check_target(to)
    notes = Notes()
    beginnings = tuple("/".join((*root, "")) for root in roots)
    chosen = [item for item in sorted(found.items()) if f"{item[0]}/".startswith(beginnings)]
    present = [f"{name}/" for name, _ in chosen]
    notes.missing |= {
        beginning[:-1]
        for beginning in beginnings
        if beginning and not any(name.startswith(beginning) for name in present)
    }
    folder = incoming.name_of("s3", place.bucket, place.prefix, str(node))
    with (
        incoming.target_folder(to) as target,
        incoming.incoming(target, folder, keeps=False) as arrived,
        contextlib.closing(Placing(arrived, target, roots, notes, node)) as placing,
    ):
        for number, (name, one) in enumerate(chosen):
            with _noting(notes, name):
                placing.item(number, name, Entry(FILE, 0o644, one.size, -1, ""))
        placing.check_space()
        files = ((chosen[number][1], placing.open(number)) for number in placing.wanted)
        metadata = s3.download(aws, place.bucket, files)
        for number in placing.wanted:
            name, one = chosen[number]
            about = metadata.get(one.key, {})
            text, link = about.get(MTIME, ""), about.get(LINK, "")
            mtime_ns = int(text) if text.isascii() and text.isdigit() and len(text) < 30 else 0
            here = target.path / name
            if mtime_ns and os.path.lexists(here) and here.lstat().st_mtime_ns > mtime_ns:
                notes.left_out(name, "the file on this computer is newer", counts=False)
                placing.drop(name)
            elif link and not one.size:
                placing.drop(name)
                with _noting(notes, name):
                    placing.item(number, name, Entry(SYMLINK, 0, 0, mtime_ns, link))
            else:
                placing.set_time(name, mtime_ns)
        return placing.move(known or Checkpoints({}))


@contextlib.contextmanager
def _noting(notes: Notes, name: str) -> Iterator[None]:
    """Leave out what no node of ours has written."""
    try:
        yield
    except ProtocolError as error:
        notes.left_out(name, str(error))
