"""Objects in Amazon S3: listed and read. The caller's own credentials need s3:ListBucket and s3:GetObject.

s3transfer downloads files, as in boto3's `download_fileobj`: objects and ranges of them in parallel, with
retries and checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError, CloudDDPError, q
from cloudddp.text import one_line

MAX_OBJECTS = 200_000  # of one job
PART = 64 << 20  # bytes; larger objects are read in ranges of that size
QUEUED = 20  # objects, each with its file open, and as many requests


class S3Object(msgspec.Struct, frozen=True):
    """An object, as S3 lists it. `size` is in bytes; `etag` identifies the contents."""

    key: Annotated[str, Meta(max_length=4096)] = msgspec.field(name="Key")
    size: Annotated[int, Meta(ge=0)] = msgspec.field(name="Size")
    etag: Annotated[str, Meta(max_length=200)] = msgspec.field(name="ETag")


class _Page(msgspec.Struct, frozen=True):
    contents: list[S3Object] = msgspec.field(name="Contents", default_factory=list)
    following: str | None = msgspec.field(name="NextContinuationToken", default=None)


def listed(aws: AWS, bucket: str, prefix: str) -> list[S3Object]:
    """Return the objects whose keys begin with `prefix`. Raises AWSError; CloudDDPError for more than
    MAX_OBJECTS."""
    found: list[S3Object] = []
    token: dict[str, str] = {}
    while True:
        page = aws.read("s3", "list_objects_v2", _Page, Bucket=bucket, Prefix=prefix, **token)
        found += page.contents
        if page.following is None or not page.contents:
            return found
        if len(found) > MAX_OBJECTS:
            raise CloudDDPError(
                f"there are more than {MAX_OBJECTS} objects in s3://{bucket}/{one_line(prefix)}",
                hint=f"copy them with `aws s3 sync {q(f's3://{bucket}/{one_line(prefix)}')} FOLDER`",
            )
        token = {"ContinuationToken": page.following}


def read(aws: AWS, bucket: str, key: str, size: int) -> bytes:
    """Return the contents of a small object, `size` bytes at most. Raises AWSError."""
    from botocore.exceptions import BotoCoreError

    body: Any = aws.call("s3", "get_object", Bucket=bucket, Key=key)["Body"]
    try:
        return bytes(body.read(size))
    except (BotoCoreError, OSError) as error:
        raise _broken(bucket, key, error) from None
    finally:
        body.close()


def download(
    aws: AWS, bucket: str, files: Iterable[tuple[S3Object, BinaryIO]]
) -> dict[str, Mapping[str, str]]:
    """Write objects to open files, several at once, and close these. Return the objects' metadata by their
    keys. Raises AWSError, also for an object that has changed since it was listed; OSError where a file
    cannot be written; and what `files` raises."""
    from s3transfer.manager import TransferConfig, TransferManager

    client, pending = _Client(aws), list[Any]()
    limits = TransferConfig(PART, PART, max_submission_queue_size=QUEUED, max_request_queue_size=QUEUED)
    with TransferManager(client, limits) as manager:
        for one, file in files:
            client.objects[one.key] = one
            pending.append(manager.download(bucket, one.key, file))
            for future in [one for one in pending if one.done()]:
                pending.remove(future)
                _finish(future)
        for future in pending:
            _finish(future)
    return client.metadata


def _finish(future: Any) -> None:
    from s3transfer.exceptions import RetriesExceededError

    wanted = future.meta.call_args
    try:
        with wanted.fileobj:
            future.result()
    except RetriesExceededError as error:
        raise _broken(wanted.bucket, wanted.key, error.last_exception) from None


class _Client:
    """What s3transfer needs of boto3's client. Its calls are AWS.call's. It knows the `objects` that were
    listed, and keeps their `metadata`."""

    def __init__(self, aws: AWS) -> None:
        self.meta = aws.client("s3").meta
        self.objects: dict[str, S3Object] = {}
        self.metadata: dict[str, Mapping[str, str]] = {}
        self._aws = aws

    def head_object(self, *, Key: str, **_: Any) -> dict[str, Any]:  # noqa: N803  boto3's
        one = self.objects[Key]
        return {"ContentLength": one.size, "ETag": one.etag}

    def get_object(self, *, Key: str, **params: Any) -> Any:  # noqa: N803  boto3's
        """Get an object, or a range of it, if it has not changed."""
        one = self.objects[Key]
        wanted = {"IfMatch": one.etag, **params}
        if not one.size:
            wanted.pop("Range", None)  # S3 refuses any of an empty object
        answer = self._aws.call("s3", "get_object", Key=Key, **wanted)
        self.metadata[Key] = {str(name): str(value) for name, value in answer.get("Metadata", {}).items()}
        return answer


def _broken(bucket: str, key: str, error: Exception) -> AWSError:
    return AWSError(
        f"the transfer of s3://{bucket}/{one_line(key, 300)} broke: {one_line(str(error), 200)}",
        hint="repeat the command",
    )
