"""Uploads files to Amazon S3. Runs as a process of its own, with a Python that has boto3 (copies.py starts
it).

stdin: a line of JSON with `bucket`, `region` and `patience`, then one for each file: `path`, `key`,
`metadata`. stdout: lines of JSON. `{"at": N}`: bytes were sent; `{"done": N, "size": BYTES}`; `{"failed": N,
"why": TEXT, "for_good": BOOL}`; `{"fatal": TEXT}`: nothing can be uploaded. N is the number of the file.
boto3 does the rest: credentials of the node's role and their renewal, endpoints of all partitions,
signatures, checksums, parts of large files, retries.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

AT_ONCE = 4  # files
PART = 16 << 20  # bytes; files of that size and more are sent in parts
CONNECTIONS = 4  # for the parts of one file
ATTEMPTS = 4  # for one request
CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
PAUSE = 0.5  # seconds between two reports that bytes were sent
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
# Errors after which the same request may succeed, beyond botocore's own retries.
TRANSIENT = (
    "RequestTimeout",
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "BadDigest",
)


def main() -> int:
    """Upload what stdin names, and report on stdout."""
    request = json.loads(sys.stdin.readline())
    files = [json.loads(line) for line in sys.stdin]
    try:
        uploader = _Uploader(request)
    except Exception as error:  # boto3 is broken, or its configuration is
        _report({"fatal": _text(error)})
        return 1
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, file in enumerate(files):
            pool.submit(uploader.upload, number, file)
    return 0


_lock = threading.Lock()


def _report(line: dict[str, Any]) -> None:
    with _lock:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class _Uploader:
    def __init__(self, request: dict[str, Any]) -> None:
        self._bucket: str = request["bucket"]
        self._patience: float = request["patience"]
        self._s3 = self._client(request["region"])
        self._stopped = False
        self._reported_at = 0.0

    def _client(self, region: str) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=min(CONNECT_SECONDS, self._patience),
            read_timeout=min(READ_SECONDS, self._patience),
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=AT_ONCE * CONNECTIONS,
        )
        return boto3.session.Session().client("s3", region_name=region, config=config)

    def upload(self, number: int, file: dict[str, Any]) -> None:
        """Upload one file, and report how that ended."""
        if self._stopped:
            return
        try:
            size = self._upload(number, file)
            _report({"done": number, "size": size})
        except OSError as error:
            _report({"failed": number, "why": (error.strerror or str(error))[:LONGEST], "for_good": True})
        except Exception as error:
            self._failed(number, file, _cause(error))

    def _failed(self, number: int, file: dict[str, Any], error: BaseException) -> None:
        region = _other_region(error)
        if (
            region and file.get("region") != region
        ):  # with an endpoint of the user, boto3 does not follow the redirect
            self._s3 = self._client(region)
            self.upload(number, {**file, "region": region})
            return
        code = _code(error)
        if type(error).__name__ in ("NoCredentialsError", "CredentialRetrievalError"):
            self._stopped = True
            _report(
                {"fatal": "the node has no credentials: no instance profile with a role is attached to it"}
            )
        elif code in FOR_ALL:
            self._stopped = True
            _report({"fatal": _text(error)})
        else:
            again = code is None or code in TRANSIENT or code.startswith("5")
            _report({"failed": number, "why": _text(error), "for_good": not again})

    def _upload(self, number: int, file: dict[str, Any]) -> int:
        """Return the number of bytes. Raises OSError for what is not a regular file, and what boto3
        raises."""
        from boto3.s3.transfer import TransferConfig

        metadata, path = file["metadata"], file["path"]
        if path is None:
            self._s3.put_object(Bucket=self._bucket, Key=file["key"], Body=b"", Metadata=metadata)
            return 0
        # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise OSError(0, "not a regular file")
            self._s3.upload_file(
                f"/proc/self/fd/{descriptor}",
                self._bucket,
                file["key"],
                ExtraArgs={"Metadata": metadata},
                Callback=lambda _: self._sent(number),
                Config=TransferConfig(
                    multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=CONNECTIONS
                ),
            )
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise OSError(0, "it changed while it was copied")
            return before.st_size
        finally:
            os.close(descriptor)

    def _sent(self, number: int) -> None:
        now = time.monotonic()
        if now - self._reported_at > PAUSE:
            self._reported_at = now
            _report({"at": number})


def _cause(error: BaseException) -> BaseException:
    """Return the error that boto3's transfers have put into words."""
    if type(error).__name__ == "S3UploadFailedError" and error.__context__ is not None:
        return error.__context__
    return error


def _answer(error: BaseException) -> dict[str, Any]:
    found = getattr(error, "response", None)
    return found if isinstance(found, dict) else {}


def _code(error: BaseException) -> Optional[str]:
    """Return the code of S3's answer, None where there was none."""
    code = _answer(error).get("Error", {}).get("Code")
    return None if code is None else str(code)


def _other_region(error: BaseException) -> str:
    """Return the bucket's region if S3 has answered that it is another one, or ''."""
    answer = _answer(error).get("ResponseMetadata", {})
    if answer.get("HTTPStatusCode") not in (301, 307, 400):
        return ""
    return str(answer.get("HTTPHeaders", {}).get("x-amz-bucket-region", ""))


def _text(error: BaseException) -> str:
    code = _code(error)
    message = str(_answer(error).get("Error", {}).get("Message", "")) if code else str(error)
    return " ".join(f"{code or type(error).__name__}: {message}".split())[:LONGEST]
