"""The files that this node offers to others before ranks start; sending one, and writing one that comes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent.files import paths, records, selection
from agent.files import shared as shared_folders
from agent.files.checkpoints import parts
from agent.files.records import Received
from agent.files.scan import Scan
from agent.jobs import phases
from agent.node import store
from agent.node.link import Link
from agent.sync.writer import FileWriter
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.checkpoints import is_sharded
from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.sending import Sender, Wanted, as_missing
from cloudddp.agent.protocol.snapshots import (
    MAX_BEYOND,
    MAX_OFFER,
    MAX_PATTERNS,
    MAX_SHARED,
    Offer,
    Snapshot,
    SnapshotSearch,
)
from cloudddp.agent.protocol.transfer import DIGEST, Record

PIECE = 1 << 20  # bytes


def newest(search: SnapshotSearch) -> Snapshot:
    project = store.project_folder(search.project)
    skipped: list[str] = []
    for one in _found(search):
        if is_sharded([one.path]):  # alone it would be no checkpoint
            continue
        path = project / one.path
        with contextlib.suppress(OSError):
            if is_valid(path):
                return replace(one, digest=digest(path), skipped=tuple(skipped[:MAX_PATTERNS]))
        skipped.append(one.path)
    return Snapshot(skipped=tuple(skipped[:MAX_PATTERNS]))


def named(search: SnapshotSearch) -> Offer:
    """Offer all files that match, the newest first, as many as one message may name, or the newest one. They
    are not read."""
    found = _fitting(_found(search)) if search.every else (newest(search),)
    project, began = store.project_folder(search.project), phases.first_began()
    scan = Scan(project, (), shared_folders.places().paths, began, again=0)
    for _ in scan if began else ():
        pass  # it notes the folders with shards
    return Offer(found, parts=parts(project, scan.shards))


def written(search: SnapshotSearch) -> Offer:
    """Offer what jobs wrote on this node, and copies of what they wrote on others, as `named`."""
    project, began = store.project_folder(search.project), phases.first_began()
    copied = records.received(project)
    scan = Scan(project, search.outputs, (*search.scratch, *shared_folders.places().paths), began, again=0)
    own, copies = [], []
    for one in scan if began else ():
        is_output = one.place in scan.outputs if search.outputs else one.place != f"{REPLACED}/"
        if is_output and stat.S_ISREG(one.found.info.st_mode) and _is_usable(one.found.name):
            described = _describe(one.found.name, one.found.info, copied)
            if described.origin:
                copies.append(described)
            else:
                own.append(one._replace(pulled=False))  # the limit counts those, too: other nodes lack them
    have = parts(project, scan.shards)
    if not search.limit:
        return Offer((), parts=have)
    taken, limit = [], search.limit
    for wanted in (True, False):  # checkpoints first
        some = [one for one in own if selection.is_checkpoint(one.found.name) is wanted]
        taken += selection.choose(some, limit)[0] if limit else []
        limit = max(search.limit - sum(one.size for one in taken), 0)
    shared = [*(_describe(one.found.name, one.found.info, copied) for one in taken), *copies]
    fitting = _fitting(sorted(shared, key=_first_shared))
    beyond = {one.found.name for one in own}.union(one.path for one in copies)
    beyond.difference_update(one.path for one in fitting)
    names = sorted(beyond, key=lambda name: (not selection.is_checkpoint(name), name))
    return Offer(fitting, beyond=tuple(names[:MAX_BEYOND]), parts=have)


def _first_shared(one: Snapshot) -> tuple[bool, int, int]:
    return not selection.is_checkpoint(one.path), *_newest_first(one)


def _fitting(found: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Return as many as one message may name."""
    length, count = 0, 0
    for one in found[:MAX_SHARED]:
        length += len(json.dumps(one.path)) + 200  # the other fields
        if length > MAX_OFFER:
            break
        count += 1
    return tuple(found[:count])


def _is_usable(name: str) -> bool:
    """Whether a message may name a file (protocol.snapshots refuses ~), and the file is not one that is being
    written."""
    with contextlib.suppress(UnicodeEncodeError):
        name.encode()
        return len(name) <= MAX_PATH and not name.startswith("~") and not name.endswith(paths.TEMPORARY)
    return False


def _found(search: SnapshotSearch) -> list[Snapshot]:
    """Return the files that match, the newest first."""
    project = store.project_folder(search.project)
    excluded, everywhere = set(search.exclude), shared_folders.places().paths
    copied = records.received(project)
    found: dict[str, Snapshot] = {}
    for pattern in search.patterns:
        # Before Python 3.13 a pattern that ends with ** finds folders only.
        for path in project.glob(f"{pattern}/*" if pattern.endswith("**") else pattern):
            name = path.relative_to(project).as_posix()
            if shared_folders.is_below(name, everywhere):
                continue
            with contextlib.suppress(OSError):
                info = os.lstat(path)
                if stat.S_ISREG(info.st_mode) and _is_usable(name) and name not in excluded:
                    found[name] = _describe(name, info, copied)
    return sorted(found.values(), key=_newest_first)


def _describe(name: str, info: os.stat_result, copied: Received) -> Snapshot:
    mode = stat.S_IMODE(info.st_mode) & 0o777
    return Snapshot(name, max(info.st_mtime_ns, 0), info.st_size, origin=copied.origin(name, info), mode=mode)


def _newest_first(one: Snapshot) -> tuple[int, int]:
    return -one.mtime_ns, -one.size


def is_valid(path: Path) -> bool:
    """Whether a file is complete, as far as that can be seen: torch.save writes zip archives with checksums.
    Raises OSError."""
    if path.suffix != ".pt":
        return True
    with open(path, "rb") as file:
        if file.read(2) not in (b"PK", b""):  # a pickle, as older versions wrote
            return True
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # whatever is wrong with it
        return False


def is_as_offered(project: Path, file: Snapshot) -> bool:
    """Whether a file is there and complete. One with a digest is compared by the node that gets it. Raises
    OSError."""
    path = project / file.path
    info = os.lstat(path)
    is_same = (info.st_size, max(info.st_mtime_ns, 0)) == (file.size, file.mtime_ns)
    return bool(file.digest) or (is_same and is_valid(path))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def send(link: Link, secret: str, project: Path, name: str) -> None:
    """Send a file as frames. Raises what REFUSED names."""
    for data in Sender(str(project), secret.encode(), on_lost=as_missing).frames([Wanted(0, name)]):
        link.write_all(data)


@functools.cache
def _remove_stale(folder: Path) -> None:
    """Remove what an agent that was killed has left in a folder."""
    for stale in folder.glob(f".*{paths.TEMPORARY}"):
        with contextlib.suppress(OSError):
            stale.unlink()


def receive(link: Link, secret: str, project: Path, wanted: Snapshot, *, durable: bool = True) -> bool:
    """Write the snapshot that `send` sends; return whether it is there. The file appears under its name once
    it is complete and what was announced, and if `durable` is on the disk. Raises OSError, ProtocolError, and
    SystemExit for anything that is not as announced."""
    _remove_stale(paths.replaceable(project, wanted.path).parent)
    with contextlib.closing(FileWriter(project, durable=durable)) as writer:
        incoming = writer.begin(wanted.path)
        try:
            while (frame := transfer.read_frame(link.read_all, secret.encode())).kind == transfer.PART:
                _, offset, data = transfer.read_part(frame)
                if offset + len(data) > wanted.size:
                    raise _damaged(wanted)
                incoming.write(offset, data)
            if frame.kind == transfer.BATCH:
                ((record, contents),) = transfer.read_batch(frame)
                if record.missing or record.deleted:
                    return False
                incoming.write(0, contents)
            else:
                record = transfer.read_end(frame)
            _check(wanted, record)
            if not incoming.finish(record, wanted.mode):
                raise _damaged(wanted)
            return True
        except EOFError:
            missing = wanted.size - incoming.written
            raise SystemExit(f"the stream of {wanted.path!r} ended {missing} bytes too early") from None
        finally:
            incoming.discard()
            incoming.close()


def _check(wanted: Snapshot, record: Record) -> None:
    """Raise SystemExit for a file that is not the one that was announced."""
    announced = wanted.size, wanted.mtime_ns, wanted.digest[: 2 * DIGEST]
    digest = record.digest.hex() if wanted.digest else ""
    if announced != (record.size, max(record.mtime_ns, 0), digest):
        raise _damaged(wanted)


def _damaged(wanted: Snapshot) -> SystemExit:
    return SystemExit(f"{wanted.path!r} was damaged on its way")
