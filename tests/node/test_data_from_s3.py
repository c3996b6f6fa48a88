"""[[data]] from S3, as the agent copies it before ranks start: against moto's S3."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import Node
from support.imds import given_a_role
from support.s3_server import S3, refusal

from agent.s3 import download
from cloudddp.agent.protocol.start import DataCopy, SetupReply

BUCKET = "results"  # of the fixture
LARGE = bytes(range(256)) * ((33 << 20) // 256)


@pytest.fixture
def node(node: Node, s3: S3) -> Iterator[Node]:
    with given_a_role(node, s3.url):
        yield node


def put(s3: S3, **objects: bytes | str) -> None:
    for key, body in objects.items():
        s3.client.put_object(Bucket=BUCKET, Key=key, Body=body)


def copy(node: Node, *commands: str, prefix: str = "sets/one", path: str = "data") -> SetupReply:
    data = (DataCopy(BUCKET, prefix, path),)
    places = {"CLOUDDDP_DATA_DATA": path}
    return node.set_up(*commands, data=data, paths=places, python=sys.executable)  # which has boto3


def reads(s3: S3) -> int:
    return sum(one.startswith("GET") and "list-type" not in one for one in s3.requests)


def files(node: Node, path: str = "data") -> dict[str, bytes]:
    folder = node.project / path
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_prefix_is_copied_and_only_what_differs_is_read_again(node: Node, s3: S3) -> None:
    put(s3, **{"sets/one/a b/\u65e5": "1", "sets/one/large": LARGE})
    put(s3, **{"sets/one/folder/": "", "sets/one-not": "x", "sets/two/b": "2"})
    assert copy(node, 'cat "$CLOUDDDP_DATA_DATA/a b/"* > seen') == SetupReply(exit_code=0)
    assert files(node) == {"a b/\u65e5": b"1", "large": LARGE}
    assert (node.project / "seen").read_text() == "1"
    assert (node.project / "data").is_symlink()
    before = reads(s3)
    assert copy(node).exit_code == 0
    assert reads(s3) == before
    # In a read-only folder: another size, another time with the same size, a file of a job, a link out of it.
    folder = node.project / "data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o500
    folder.chmod(0o700)  # as a job may, which runs as its owner
    put(s3, **{"sets/one/a b/\u65e5": "23", "sets/one/new": "4"})
    os.utime(folder / "large", (1, 1))
    (folder / "left").write_text("by a job")
    (folder / "link").symlink_to("/etc")
    assert copy(node).exit_code == 0
    assert files(node) == {"a b/\u65e5": b"23", "large": LARGE, "new": b"4"}
    assert not (folder / "link").exists()
    assert Path("/etc/passwd").exists()
    s3.client.delete_object(Bucket=BUCKET, Key="sets/one/new")
    assert copy(node).exit_code == 0
    assert set(files(node)) == {"a b/\u65e5", "large"}
    # Another prefix takes the place of the first, there or elsewhere in the project.
    for path in ("data", "deep/in/the/project"):
        assert copy(node, prefix="sets/two", path=path).exit_code == 0
        assert files(node, path) == {"b": b"2"}


def test_bucket_in_another_region_is_named(node: Node, s3: S3) -> None:
    """Transfers between regions are billed."""
    elsewhere = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}
    s3.client.create_bucket(Bucket="far", **elsewhere)
    for bucket, said in (("far", True), (BUCKET, False)):
        s3.client.put_object(Bucket=bucket, Key="sets/one/a", Body=b"1")
        data = (DataCopy(bucket, "sets/one", "data"),)
        assert node.set_up(data=data, python=sys.executable, job=bucket).exit_code == 0
        shown = (node.home / f".cloudddp/jobs/{node.id(bucket)}/setup.log").read_text()
        text = "is in eu-west-1, and this node in us-east-1: AWS bills transfers between regions"
        assert (f"s3://{bucket} {text}" in shown) is said, shown


def test_prefix_without_objects_is_refused(node: Node, s3: S3) -> None:
    put(s3, **{"sets/one/": "x"})
    reply = copy(node, "touch never")
    assert (reply.exit_code, reply.data, reply.command) == (1, True, "s3://results/sets/one/")
    assert "it has no objects" in reply.output
    assert not (node.project / "never").exists()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["sets/one/../../up"], "is no path of a file"),
        (["sets/one//double"], "is no path of a file"),
        (["sets/one/" + "n" * 256], "is no path of a file"),
        (["sets/one/a", "sets/one/a/b"], "sets/one/a is an object and has objects below it"),
    ],
)
def test_keys_that_cannot_be_files_of_a_folder_are_refused(s3: S3, keys: list[str], why: str) -> None:
    put(s3, **dict.fromkeys(keys, "x"))
    with pytest.raises(download.Refused, match=why):
        download.files_of(s3.client, BUCKET, "sets/one")


def test_object_that_is_refused_or_cut_short_is_named(node: Node, s3: S3) -> None:
    put(s3, **{"sets/one/a": "1", "sets/one/b": "2"})
    denied = refusal("403 Forbidden", "AccessDenied")
    s3.answer = lambda environ: denied if environ["PATH_INFO"].endswith("/sets/one/b") else None
    reply = copy(node, "touch never")
    assert reply.data
    assert "1 of 2 objects were not copied: sets/one/b: " in reply.output
    s3.answer = lambda environ: ("200 OK", b"") if environ["PATH_INFO"].endswith("/sets/one/b") else None
    reply = copy(node, "touch never")
    assert (reply.exit_code, reply.data) == (1, True)
    assert "sets/one/b" in reply.output or "different: b" in reply.output
    assert not (node.project / "never").exists()
    s3.answer = lambda _: None
    assert copy(node, "touch now").exit_code == 0
    assert (node.project / "now").exists()


def test_file_of_the_project_at_the_path_is_kept(node: Node, s3: S3) -> None:
    put(s3, **{"sets/one/a": "1"})
    (node.project / "data").mkdir(parents=True)
    (node.project / "data" / "mine").write_text("kept")
    reply = copy(node)
    assert "path = data: the project has a file or folder there" in reply.output
    assert files(node) == {"mine": b"kept"}


@pytest.mark.usefixtures("metadata")
def test_node_without_a_role_is_reported(node: Node, s3: S3) -> None:
    put(s3, **{"sets/one/a": "1"})
    reply = copy(node)
    assert (reply.exit_code, reply.data) == (1, True)
    assert "no instance profile with a role is attached" in reply.output
