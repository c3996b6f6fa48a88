"""Objects in Amazon S3: listed and read. The caller's own credentials need s3:ListBucket and s3:GetObject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError, CloudDDPError
from cloudddp.text import one_line

MAX_OBJECTS = 200_000  # of one job
PIECE = 1 << 20  # bytes


class Object(msgspec.Struct, frozen=True):
    """An object, as S3 lists it. `size` is in bytes."""

    key: Annotated[str, Meta(max_length=4096)] = msgspec.field(name="Key")
    size: Annotated[int, Meta(ge=0)] = msgspec.field(name="Size")


class _Page(msgspec.Struct, frozen=True):
    contents: list[Object] = msgspec.field(name="Contents", default_factory=list)
    following: str | None = msgspec.field(name="NextContinuationToken", default=None)


def listed(aws: AWS, bucket: str, prefix: str) -> list[Object]:
    """Return the objects whose keys begin with `prefix`. Raises AWSError; CloudDDPError for more than
    MAX_OBJECTS."""
    found: list[Object] = []
    token: dict[str, str] = {}
    while True:
        page = aws.read("s3", "list_objects_v2", _Page, Bucket=bucket, Prefix=prefix, **token)
        found += page.contents
        if page.following is None or not page.contents:
            return found
        if len(found) > MAX_OBJECTS:
            raise CloudDDPError(
                f"there are more than {MAX_OBJECTS} objects in s3://{bucket}/{one_line(prefix)}",
                hint=f"copy them with `aws s3 sync s3://{bucket}/{one_line(prefix)} FOLDER`",
            )
        token = {"ContinuationToken": page.following}


def read(
    aws: AWS, bucket: str, key: str, begin: Callable[[Mapping[str, str]], bool], data: Callable[[bytes], None]
) -> None:
    """Read an object: `begin` gets its metadata, and returns whether `data` shall get the contents, in
    pieces. Raises AWSError, also if the transfer breaks, and what the two raise."""
    from botocore.exceptions import BotoCoreError

    answer: Any = aws.call("s3", "get_object", Bucket=bucket, Key=key)
    body = answer["Body"]
    try:
        if not begin({str(name): str(value) for name, value in answer.get("Metadata", {}).items()}):
            return
        while True:
            try:
                piece = body.read(PIECE)
            except (BotoCoreError, OSError) as error:
                raise AWSError(
                    f"the transfer of s3://{bucket}/{one_line(key, 300)} broke: {one_line(str(error), 200)}",
                    hint="repeat the command",
                ) from None
            if not piece:
                return
            data(piece)
    finally:
        body.close()
