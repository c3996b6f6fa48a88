"""Uploads files to Amazon S3. Runs as a process of its own, with a Python that has boto3 (copies.py starts
it), and uses little else of the agent.

stdin: JSON with `bucket`, `region`, `patience` (seconds without progress after which it gives up), `ends`
(when it does at the latest, by the monotonic clock) and `files`, each with `path` (null: an empty object),
`key` and `metadata`. stdout: JSON with the number of files that are `done` and their `size` in bytes, what
is `lost` and why, the numbers of the files that are `left` and `why`, and `fatal`: why nothing can be
uploaded, or ''.

s3transfer does the rest, as in boto3's `upload_file`: files and parts in parallel, checksums and retries;
boto3 knows the credentials of the node's role, the endpoints of all partitions and the regions of buckets.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import threading
import time
from typing import Any, Optional

from agent.s3 import boto_process

PART = 16 << 20  # bytes; files of that size and more are sent in parts
CONNECTIONS = 16
QUEUED = 16  # requests that wait for a connection; each has its file open
ATTEMPTS = 4  # for one request
CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
LONGEST = 450  # characters of a reason
# Errors after which no file can be uploaded. Any other answer of S3 concerns one file.
FOR_ALL = frozenset(
    (
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidToken",
        "NoSuchBucket",
        "NotSignedUp",
        "PermanentRedirect",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "KMS.DisabledException",
        "KMS.NotFoundException",
    )
)
# Errors of a request (4xx) that may succeed when it is repeated, beyond botocore's own retries.
TRANSIENT = ("BadDigest", "OperationAborted", "RequestTimeout")


def main() -> int:
    """Upload what stdin names, and report on stdout."""
    upload = _Upload(json.load(sys.stdin))
    thread = threading.Thread(target=upload.run, daemon=True)
    thread.start()
    while thread.is_alive() and (seconds := upload.until() - time.monotonic()) > 0:
        thread.join(seconds)
    json.dump(upload.outcome(), sys.stdout)
    return 0


class _Upload:
    """What became of the files, by their numbers."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._bucket, self._region = request["bucket"], request["region"]
        self._patience: float = request["patience"]
        self._ends: float = request["ends"]
        self._files: list[dict[str, Any]] = request["files"]
        self._left = dict.fromkeys(range(len(self._files)), "")  # number -> why it has failed, if it has
        self._lost: list[str] = []
        self._done = self._size = 0
        self._moved = time.monotonic()  # when bytes were sent
        self._lock = threading.Lock()
        self.fatal = ""

    def until(self) -> float:
        """Return when this is given up, unless there is progress before."""
        return min(self._ends, self._moved + self._patience)

    def run(self) -> None:
        """Upload the files."""
        try:
            with self._manager() as manager:
                for number, file in enumerate(self._files):
                    watch = _Watch(self, number, file["path"])
                    extra = {"Metadata": file["metadata"]}
                    manager.upload(io.BytesIO(), self._bucket, file["key"], extra, [watch])
        except Exception as error:  # boto3 is broken, or its configuration is
            self.fatal = _text(error)

    def _manager(self) -> Any:
        from s3transfer.manager import TransferConfig, TransferManager

        longest = max(self._patience / 2, 1.0)
        client = boto_process.client(
            self._region,
            attempts=ATTEMPTS,
            connections=CONNECTIONS,
            connect=min(CONNECT_SECONDS, longest),
            read=min(READ_SECONDS, longest),
        )
        return TransferManager(client, TransferConfig(PART, PART, CONNECTIONS, max_request_queue_size=QUEUED))

    def sent(self) -> None:
        self._moved = time.monotonic()

    def succeeded(self, number: int, size: int) -> None:
        with self._lock:
            del self._left[number]
            self._done, self._size = self._done + 1, self._size + size
            self.sent()

    def failed(self, number: int, error: BaseException) -> None:
        code = _code(error)
        with self._lock:
            if isinstance(error, OSError):
                self._lose(number, (error.strerror or str(error))[:LONGEST])
            elif type(error).__name__ in ("NoCredentialsError", "CredentialRetrievalError"):
                self.fatal = boto_process.NO_CREDENTIALS
            elif code in FOR_ALL:
                self.fatal = _text(error)
            elif code is None or code in TRANSIENT or _status(error) >= 500:
                self._left[number] = _text(error)
            else:
                self._lose(number, _text(error))

    def _lose(self, number: int, why: str) -> None:
        del self._left[number]
        self._lost.append(f"{self._files[number]['key']}: {why}")

    def outcome(self) -> dict[str, Any]:
        over = "the time is over" if time.monotonic() >= self._ends else ""
        with self._lock:
            return {
                "done": self._done,
                "size": self._size,
                "lost": self._lost,
                "left": list(self._left),
                "why": next(filter(None, self._left.values()), "")
                or over
                or f"no progress for {self._patience:.0f} s",
                "fatal": self.fatal,
            }


class _Watch:
    """A subscriber of s3transfer: opens a file when its turn comes, and reports what became of it."""

    def __init__(self, upload: _Upload, number: int, path: Optional[str]) -> None:
        self._upload, self._number, self._path = upload, number, path
        self._descriptor = -1
        self._before: Optional[os.stat_result] = None

    def on_queued(self, future: Any, **_: Any) -> None:
        """Raises OSError for what is not a regular file."""
        if self._upload.fatal:
            raise InterruptedError
        if self._path is None:
            return
        # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        self._descriptor = os.open(self._path, flags)
        self._before = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._before.st_mode):
            raise OSError(0, "not a regular file")
        future.meta.call_args.fileobj = f"/proc/self/fd/{self._descriptor}"

    def on_progress(self, **_: Any) -> None:
        self._upload.sent()

    def on_done(self, future: Any, **_: Any) -> None:
        try:
            future.result()
            size = self._size()
        except Exception as error:
            if not self._upload.fatal:
                self._upload.failed(self._number, error)
        else:
            self._upload.succeeded(self._number, size)
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _size(self) -> int:
        """Return the file's size in bytes. Raises OSError if it has changed."""
        if self._before is None:
            return 0
        before, after = self._before, os.fstat(self._descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError(0, "it changed while it was copied")
        return before.st_size


def _code(error: BaseException) -> Optional[str]:
    """Return the code of S3's answer, None where there was none."""
    code = getattr(error, "response", {}).get("Error", {}).get("Code")
    return None if code is None else str(code)


def _status(error: BaseException) -> int:
    return int(getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _text(error: BaseException) -> str:
    code = _code(error)
    message = error.response["Error"].get("Message", "") if code else error  # type: ignore[attr-defined]
    return " ".join(f"{code or type(error).__name__}: {message}".split())[:LONGEST]
