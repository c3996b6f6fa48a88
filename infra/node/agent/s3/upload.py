"""Uploads files to Amazon S3. Runs as a process of its own, with a Python that has boto3 (copies.py starts
it), and uses little else of the agent.

stdin: JSON with `bucket`, `seconds` (for an answer of S3) and `files`, each with `number`, `path` (null: an
empty object), `key`, `metadata` and `is_log` (sent without its hole). stdout: a line of JSON for each file,
with its `number` and its `size` in bytes, or why it is `lost` or may be sent later (`left`); a line with
`fatal`: why nothing can be uploaded; empty lines at the start, and while bytes are sent.

s3transfer does the rest, as in boto3's `upload_file`: files and parts in parallel, checksums and retries;
boto3 knows the credentials of the node's role, the endpoints of all partitions and the regions of buckets.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from typing import Any, Optional

from agent.ranks import rank_log
from agent.s3 import boto_process
from cloudddp.agent.protocol.sending import FixedSize, is_same

ATTEMPTS = 4  # for one request
LONGEST = 450  # characters of a reason
# Errors after which no file can be uploaded, besides those of the status. Any other answer of S3 concerns one
# file.
FOR_ALL = (
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidBucketName",
    "InvalidToken",
    "KMS.DisabledException",
    "KMS.NotFoundException",
    "NoSuchBucket",
)
FORBIDDEN = (301, 403)  # the bucket is elsewhere, or the credentials do not suffice
# Errors of a request (4xx) that may succeed when it is repeated, beyond botocore's own retries.
TRANSIENT = ("BadDigest", "OperationAborted", "RequestTimeout")


def main() -> int:
    request = json.load(sys.stdin)
    try:
        with boto_process.manager(request["seconds"], ATTEMPTS) as manager:
            _report()
            for file in request["files"]:
                extra = {"Metadata": file["metadata"]}
                manager.upload(io.BytesIO(), request["bucket"], file["key"], extra, [_Watch(**file)])
    except Exception as error:  # boto3 is broken, or its configuration is
        _report(json.dumps({"fatal": _text(error)}))
    return 0


def _report(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")  # at once: other threads report, too
    sys.stdout.flush()


class _Watch:
    """A subscriber of s3transfer: opens a file when its turn comes, and reports what became of it."""

    def __init__(self, number: int, path: Optional[str], is_log: bool, **_: Any) -> None:
        self._number, self._path, self._is_log = number, path, is_log
        self._descriptor, self._size = -1, 0
        self._before: Optional[os.stat_result] = None

    def on_queued(self, future: Any, **_: Any) -> None:
        """Raises OSError for what is not a regular file."""
        if self._path is None:
            return
        # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        self._descriptor = os.open(self._path, flags)
        self._before = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._before.st_mode):
            raise OSError(0, "not a regular file")
        hole = rank_log.hole_of(self._descriptor) if self._is_log else (0, 0)
        data = FixedSize(self._descriptor, self._before.st_size, hole)
        self._size = data.size
        future.meta.call_args.fileobj = data if any(hole) else f"/proc/self/fd/{self._descriptor}"
        future.meta.provide_transfer_size(data.size)

    def on_progress(self, **_: Any) -> None:
        _report()

    def on_done(self, future: Any, **_: Any) -> None:
        found: dict[str, Any] = {"number": self._number}
        try:
            future.result()
            if self._before is not None and not is_same(self._before, os.fstat(self._descriptor)):
                raise OSError(0, "it changed while it was copied")
            found["size"] = self._size
        except Exception as error:
            kind, text = _failure(error)
            found[kind] = text
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
        _report(json.dumps(found))


def _failure(error: Exception) -> tuple[str, str]:
    """Return whether nothing can be uploaded (`fatal`), or a file is `lost`, or `left`; and why."""
    answer: dict[str, Any] = getattr(error, "response", {})
    code = answer.get("Error", {}).get("Code")
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if isinstance(error, OSError):
        return "lost", (error.strerror or str(error))[:LONGEST]
    if type(error).__name__ in ("NoCredentialsError", "CredentialRetrievalError"):
        return "fatal", boto_process.NO_CREDENTIALS
    if code in FOR_ALL or status in FORBIDDEN:
        return "fatal", _text(error)
    may_succeed = code is None or code in TRANSIENT or status >= 500
    return "left" if may_succeed else "lost", _text(error)


def _text(error: Exception) -> str:
    found = getattr(error, "response", {}).get("Error", {})
    code, message = found.get("Code", type(error).__name__), found.get("Message", "" if found else error)
    return " ".join(f"{code}: {message}".split())[:LONGEST]
