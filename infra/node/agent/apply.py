"""`apply`: make the project's folder equal to the laptop's, from a tar stream that follows the request on stdin."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tarfile
from pathlib import Path

from agent import files, store
from cloudddp.agent.protocol.files import ApplyReply, ApplyRequest
from cloudddp.agent.protocol.manifest import LINK, Entry, manifest_from_wire, path_from_wire

REQUEST = ApplyRequest


def step(request: ApplyRequest) -> ApplyReply:
    """Delete and write files.

    The new manifest is recorded last; until then one that holds the old files and the new, so that after a broken
    stream the next sync sends what is missing, and deletes what came and is no longer wanted.
    """
    folder = store.project_folder(request.project)
    manifest = manifest_from_wire(request.manifest)
    for name in manifest:
        files.inside(folder, name)
    folder.mkdir(exist_ok=True)
    store.write(files.manifest_file(folder), {**files.current_manifest(folder), **manifest})
    for name in request.delete:
        _remove(folder, path_from_wire(name))
    written = 0
    with tarfile.open(
        fileobj=sys.stdin.buffer, mode="r|", errors="surrogateescape", encoding="utf-8"
    ) as stream:
        for member in stream:
            _write(stream, member, folder, manifest[member.name])
            written += 1
    if written < request.send:  # truncated between two files, which tar treats as the end
        raise SystemExit(f"the stream ended after {written} of {request.send} files")
    store.write(files.manifest_file(folder), manifest)
    return ApplyReply(written, len(request.delete))


def _remove(folder: Path, name: str) -> None:
    path = files.replaceable(folder, name)
    with contextlib.suppress(OSError):
        path.unlink()
    for parent in path.parents:
        if parent == folder:
            return
        try:
            parent.rmdir()  # only if empty: what a job wrote stays
        except OSError:
            return


def _write(stream: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, entry: Entry) -> None:
    path = files.replaceable(folder, member.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    if entry.kind == LINK:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.symlink(entry.target, path)
        return
    temporary = files.temporary(path)
    source = stream.extractfile(member)
    if source is None:
        raise SystemExit(f"not a regular file in the stream: {member.name!r}")
    try:
        with open(temporary, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.chmod(temporary, entry.mode)
        os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it exists only where the stream broke
            temporary.unlink()
