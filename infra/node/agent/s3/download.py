"""Copies an S3 prefix to a folder of this node. Runs as a process of its own, with a Python that has boto3
(data.py starts it), and uses little else of the agent.

stdin: JSON with `bucket`, `prefix`, `region` and `folder`. It writes lines for people, and exits with 1 after
the reason why the folder is not a copy. Files that have the size and time of their object are there already,
and those without an object are removed: what is there at the end has been compared with the listing, file by
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from typing import Any, NamedTuple

from agent.s3 import boto_process

PART = 16 << 20  # bytes; larger objects are read in parts
CONNECTIONS = 32
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


class Refused(Exception):
    """Why the prefix cannot be copied."""


def main() -> int:
    """Copy what stdin names, and report."""
    request = json.load(sys.stdin)
    url = f"s3://{request['bucket']}/{request['prefix']}"
    try:
        client = boto_process.client(
            request["region"], attempts=ATTEMPTS, connections=CONNECTIONS, connect=10, read=60
        )
        _warn_of_region(client, request["bucket"], request["region"])
        objects = files_of(client, request["bucket"], request["prefix"])
        _set_writable(request["folder"], writable=True)
        _copy(client, request["bucket"], objects, request["folder"], url)
        _compare(objects, request["folder"])
        _set_writable(request["folder"], writable=False)
    except Refused as error:
        _log(f"{url}: {error}")
        return 1
    except Exception as error:  # botocore's have no common base, and a disk may be full
        name = type(error).__name__
        why = boto_process.NO_CREDENTIALS if name == "NoCredentialsError" else f"{name}: {error}"[:500]
        _log(f"{url}: {why}")
        return 1
    _log(
        f"{url}: {len(objects)} files, {_size(sum(one.size for one in objects))}, are in {request['folder']}"
    )
    return 0


def _warn_of_region(client: Any, bucket: str, own: str) -> None:
    """Log if the bucket is in another region."""
    with contextlib.suppress(client.exceptions.ClientError):
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
        if own and (where := headers.get("x-amz-bucket-region", own)) != own:
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


def _set_writable(folder: str, *, writable: bool) -> None:
    """Protect the copy, so that a job that writes there fails: the next launch would delete what it wrote."""
    for here, _, files in os.walk(folder, topdown=writable):
        if writable:
            os.chmod(here, 0o700)
        for name in files:
            path = os.path.join(here, name)
            if not writable and not os.path.islink(path):
                os.chmod(path, 0o400)
        if not writable:
            os.chmod(here, 0o500)


def _copy(client: Any, bucket: str, objects: list[Object], folder: str, url: str) -> None:
    from s3transfer.manager import TransferConfig, TransferManager

    _remove_others(folder, {one.name for one in objects})
    lacking = [one for one in objects if not _is_current(one, folder)]
    needed = sum(one.size for one in lacking)
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise Refused(f"{_size(needed)} are needed and {_size(free)} are free on the disk of {folder}")
    if not lacking:
        return
    progress = _Progress(url, needed)
    config = TransferConfig(PART, PART, CONNECTIONS, max_request_queue_size=CONNECTIONS)
    with TransferManager(client, config) as manager:
        futures = []
        for one in lacking:
            path = os.path.join(folder, one.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            futures.append((one, manager.download(bucket, one.key, path, subscribers=[progress])))
        failed = [why for one, future in futures if (why := _finished(one, future, folder))]
    if failed:
        raise Refused(f"{len(failed)} of {len(objects)} objects were not copied: {'; '.join(failed[:NAMED])}")


def _finished(one: Object, future: Any, folder: str) -> str:
    """Wait for a download, and give the file the object's time; return why it has failed, or ''."""
    try:
        future.result()
        os.utime(os.path.join(folder, one.name), (one.time, one.time))
    except Exception as error:
        return f"{one.key}: {error}"[:200]
    return ""


def _is_current(one: Object, folder: str) -> bool:
    try:
        info = os.lstat(os.path.join(folder, one.name))
    except OSError:
        return False
    return (info.st_size, int(info.st_mtime)) == (one.size, one.time)


def _remove_others(folder: str, names: set[str]) -> None:
    for here, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for name in (*files, *links):
            path = os.path.join(here, name)
            if os.path.relpath(path, folder) not in names:
                os.unlink(path)


def _compare(objects: list[Object], folder: str) -> None:
    """Raise Refused unless the folder has exactly these files."""
    wrong = [one.name for one in objects if not _is_current(one, folder)]
    count = sum(len(files) for _, _, files in os.walk(folder))
    if wrong or count != len(objects):
        raise Refused(
            f"{count} files for {len(objects)} objects; different: {', '.join(wrong[:NAMED]) or 'none'}"
        )


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


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count} {unit}" if unit == "bytes" else f"{count:.0f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
