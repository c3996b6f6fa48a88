"""[[data]] from S3: copies a prefix to a folder of this node, and links it in the project. Runs as a process
of its own, with a Python that has boto3 (steps/setup.py starts it), and uses little else of the agent.

stdin: JSON with the fields of a DataCopy, and `project`, a folder. It writes lines for people, and exits with
1 after the reason why there is no copy. Files that have the size and time of their object are there already,
and those without an object are removed: what is there at the end has been compared with the listing, file by
file.

The folder is on the fastest disk: instance storage, which the Deep Learning AMIs mount at /opt/dlami/nvme,
else the root volume. The link is replaced, so that a later launch may name another prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from agent.files import paths
from agent.s3 import boto_process

INSTANCE_STORE = Path("/opt/dlami/nvme")
FOLDER = "cloudddp-data"
ANSWER = 60.0  # seconds for S3 to answer
ATTEMPTS = 6  # for one request
REPORT_SECONDS = 5.0
NAMED = 3  # objects in a message
SPARE = 1 << 30  # bytes of the disk that stay free


class Object(NamedTuple):
    """An object: its key, the path of its file below the folder, bytes, and time in seconds."""

    key: str
    name: str
    size: int
    time: int


class Refused(OSError):
    """Why the prefix cannot be copied."""


def main() -> int:
    request = json.load(sys.stdin)
    bucket, prefix, name = request["bucket"], request["prefix"], request["path"]
    url = f"s3://{bucket}/{prefix}"
    try:
        folder = _folder(bucket, prefix, name)
        paths.link_to(Path(request["project"]), name, Path(folder), "[[data]]")
        with boto_process.manager(ANSWER, ATTEMPTS) as manager:
            _warn_of_region(manager.client, bucket)
            objects = files_of(manager.client, bucket, prefix)
            _chmod("u=rwX,go=", folder)
            _copy(manager, bucket, objects, folder, url)
            wrong, count = [one.name for one in objects if not _is_current(one, folder)], len(_names(folder))
            if wrong or count != len(objects):
                different = ", ".join(wrong[:NAMED]) or "none"
                raise Refused(f"{count} files for {len(objects)} objects; different: {different}")
            _chmod("u=rX,go=", folder)
    except Exception as error:  # botocore's have no common base, and a disk may be full
        kind = type(error).__name__
        text = str(error) if isinstance(error, OSError) else f"{kind}: {error}"[:500]
        _log(f"{url}: {boto_process.NO_CREDENTIALS if kind == 'NoCredentialsError' else text}")
        return 1
    _log(f"{url}: {len(objects)} files, {_size(sum(one.size for one in objects))}, are in {folder}")
    return 0


def _folder(bucket: str, prefix: str, name: str) -> str:
    """Return the folder of a copy, which is there then. Raises OSError."""
    is_fast = INSTANCE_STORE.is_mount() and os.access(INSTANCE_STORE, os.W_OK)
    digest = hashlib.sha256(f"{bucket}/{prefix}".encode()).hexdigest()[:12]
    folder = (INSTANCE_STORE if is_fast else Path.home()) / FOLDER / f"{Path(name).name}-{digest}"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return str(folder)


def _warn_of_region(client: Any, bucket: str) -> None:
    """Log if the bucket is in another region."""
    own = client.meta.region_name
    with contextlib.suppress(client.exceptions.ClientError):
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
        if (where := headers.get("x-amz-bucket-region", own)) != own:
            _log(f"s3://{bucket} is in {where}, and this node in {own}: AWS bills transfers between regions")


def files_of(client: Any, bucket: str, prefix: str) -> list[Object]:
    """Return the objects below a prefix. Raises Refused where they cannot be the files of a folder."""
    beginning = f"{prefix.rstrip('/')}/" if prefix else ""
    objects: dict[str, Object] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=beginning):
        for found in page.get("Contents", ()):
            key = found["Key"]
            name = key[len(beginning) :]
            if not name or name.endswith("/"):
                continue  # a folder, as the console makes it
            parts = name.split("/")
            if any(part in ("", ".", "..") or len(part.encode()) > 255 or "\0" in part for part in parts):
                raise Refused(f"the key {key!r} is no path of a file")
            objects[name] = Object(key, name, found["Size"], int(found["LastModified"].timestamp()))
    for folder in objects:
        while folder := folder.rpartition("/")[0]:
            if folder in objects:
                raise Refused(f"{objects[folder].key} is an object and has objects below it")
    if not objects:
        raise Refused("it has no objects: is the prefix right?")
    return list(objects.values())


def _chmod(mode: str, folder: str) -> None:
    """Protect the copy, so that a job that writes there fails: the next launch would delete what it wrote; or
    make it writable. No link is followed."""
    subprocess.run(["chmod", "-R", mode, folder], check=True)


def _copy(manager: Any, bucket: str, objects: list[Object], folder: str, url: str) -> None:
    for name in set(_names(folder)).difference(one.name for one in objects):
        os.unlink(os.path.join(folder, name))
        with contextlib.suppress(OSError):  # what it was in may be an object now
            os.removedirs(os.path.dirname(os.path.join(folder, name)))
    os.makedirs(folder, exist_ok=True)
    lacking = [one for one in objects if not _is_current(one, folder)]
    if not lacking:
        return
    needed = sum(one.size for one in lacking)
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise Refused(f"{_size(needed)} are needed and {_size(free)} are free on the disk of {folder}")
    progress = _Progress(url, needed)
    futures = []
    for one in lacking:
        path = os.path.join(folder, one.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        futures.append((one, manager.download(bucket, one.key, path, subscribers=[progress])))
    failed = []
    for one, future in futures:
        try:
            future.result()
            os.utime(os.path.join(folder, one.name), (one.time, one.time))
        except Exception as error:  # noqa: PERF203  each object may be refused
            failed.append(f"{one.key}: {error}"[:200])
    if failed:
        raise Refused(f"{len(failed)} of {len(objects)} objects were not copied: {'; '.join(failed[:NAMED])}")


def _is_current(one: Object, folder: str) -> bool:
    try:
        info = os.lstat(os.path.join(folder, one.name))
    except OSError:
        return False
    return (info.st_size, int(info.st_mtime)) == (one.size, one.time)


def _names(folder: str) -> list[str]:
    """Return the paths of all files and links in a folder."""
    found = []
    for here, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        found += [os.path.relpath(os.path.join(here, name), folder) for name in (*files, *links)]
    return found


class _Progress:
    """A subscriber of s3transfer, which reports how much is there."""

    def __init__(self, url: str, total: int) -> None:
        self._url, self._total = url, total
        self._done, self._reported = 0, time.monotonic()
        self._lock = threading.Lock()

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        with self._lock:
            self._done += bytes_transferred
            now = time.monotonic()
            if now - self._reported >= REPORT_SECONDS:
                self._reported = now
                _log(f"{self._url}: {_size(self._done)} of {_size(self._total)}")


def _log(text: str) -> None:
    print("".join(c if c.isprintable() else "?" for c in text), flush=True)


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
