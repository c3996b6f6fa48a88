"""Results that are pulled from S3: any program on a node could have written these objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.s3_server import S3

from cloudddp.agent.protocol.copies import Destination
from cloudddp.agent.protocol.writing import begun_name
from cloudddp.aws import s3 as s3_objects
from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError, CloudDDPError
from cloudddp.job.results import s3_pull
from cloudddp.job.results.incoming import name_of
from cloudddp.job.results.pull import Pulled

BUCKET, PREFIX = "results", "team/c/job"
PLACE = Destination(BUCKET, PREFIX, (), limit=9.0, patience=9.0)
MTIME = 1_700_000_000_000_000_001  # ns
LIST = (
    '<ListBucketResult><Contents><Key>{key}</Key><Size>{size}</Size><ETag>"x"</ETag></Contents>'
    "<IsTruncated>false</IsTruncated></ListBucketResult>"
)


@pytest.fixture
def aws(s3: S3, monkeypatch: pytest.MonkeyPatch) -> AWS:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    return AWS(region="us-east-1")


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


def put(s3: S3, name: str, body: bytes = b"", **metadata: str) -> None:
    found = {"mtime-ns": str(MTIME), **metadata}
    s3.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/node-0/outputs/{name}", Body=body, Metadata=found)


def pulled(aws: AWS, to: Path, *names: str) -> Pulled:
    found = s3_pull.find(aws, PLACE)[0].outputs
    return s3_pull.fetch(aws, PLACE, found, names or ("runs",), node=0, to=to)


def reads(s3: S3) -> list[str]:
    return [one for one in s3.requests if one.startswith("GET") and "/node-0/" in one]


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_files_and_links_are_placed_with_their_times(
    aws: AWS, s3: S3, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large object is read in ranges."""
    monkeypatch.setattr(s3_objects, "PART", 1 << 20)
    put(s3, "runs/large", large := bytes(range(256)) * (1 << 13) + b"end")
    put(s3, "runs/a b/model+%20", b"weights")
    put(s3, "runs/empty")
    killed = to / name_of("s3", BUCKET, PREFIX, "0") / "files"  # left by a pull that was killed
    killed.mkdir(parents=True)
    killed.parent.chmod(0o700)
    (killed / begun_name("runs/empty")).write_text("x")
    put(s3, "runs/last", link="a b/model+%20")
    put(s3, "other", b"not requested")
    for number in range(50):
        put(s3, f"runs/many/{number}", str(number).encode())
    found = pulled(aws, to)
    assert (found.files, found.notes, found.left) == (54, (), ())
    assert (to / "runs/large").read_bytes() == large
    assert (to / "runs/a b/model+%20").read_bytes() == b"weights"
    assert (to / "runs/a b/model+%20").stat().st_mtime_ns == MTIME
    assert (to / "runs/empty").read_bytes() == b""
    assert (to / "runs/last").readlink() == Path("a b/model+%20")
    assert [(to / f"runs/many/{number}").read_text() for number in range(50)] == [*map(str, range(50))]
    assert sorted(path.name for path in to.iterdir()) == ["runs"]
    assert len(reads(s3)) == 53 + 3


def test_names_and_links_that_lead_elsewhere_are_left_out(aws: AWS, s3: S3, to: Path) -> None:
    for name in ("runs/../../evil", "runs/.git/hooks/evil", "runs/a/evil", f"runs/{'d' * 300}", "runs/good"):
        put(s3, name, b"x")
    put(s3, "runs/link", link="../../evil")
    put(s3, "runs/a", link="b")
    found = pulled(aws, to)
    assert below(to) == ["runs/a/evil", "runs/good"]
    assert [path.name for path in to.parent.iterdir()] == ["to"]
    texts = "\n".join(found.notes)
    for expected in (
        "left out runs/../../evil: ",
        "left out runs/.git: git or cloudddp would act on it",
        "left out runs/link: 'runs/link' is a link to '../../evil', which was not requested",
        f"left out runs/a: {to}/runs/a is a folder here and a file in the results; remove it",
        "its path is too long",
    ):
        assert expected in texts
    assert not any("hooks" in one or ".." in one or "ddd" in one for one in reads(s3))


def test_newer_files_on_this_computer_stay(aws: AWS, s3: S3, to: Path) -> None:
    (to / "runs").mkdir(parents=True)
    for name in ("newer", "older"):
        (to / "runs" / name).write_text("mine")
        put(s3, f"runs/{name}", b"theirs")
    os.utime(to / "runs" / "older", ns=(MTIME - 1, MTIME - 1))
    found = pulled(aws, to)
    assert (found.notes, found.left) == (("left out runs/newer: the file on this computer is newer",), ())
    assert ((to / "runs/newer").read_text(), (to / "runs/older").read_text()) == ("mine", "theirs")


def test_object_that_changes_meanwhile_is_refused(aws: AWS, s3: S3, to: Path) -> None:
    """It may be of any size now. What had arrived is not moved."""
    put(s3, "runs/a", b"a")
    put(s3, "runs/b", b"b")
    found = s3_pull.find(aws, PLACE)[0].outputs
    put(s3, "runs/a", b"aa")
    with pytest.raises(AWSError, match="s3:GetObject: PreconditionFailed") as error:
        s3_pull.fetch(aws, PLACE, found, ["runs"], node=0, to=to)
    assert error.value.hint == "the object has changed meanwhile: repeat the command"
    assert not to.exists()


def test_object_that_does_not_fit_is_not_read(aws: AWS, s3: S3, to: Path) -> None:
    def large(environ: dict[str, Any]) -> tuple[str, bytes] | None:
        listing = LIST.format(key=f"{PREFIX}/node-0/outputs/runs/a", size=1 << 60)
        return ("200 OK", listing.encode()) if "list-type" in environ["QUERY_STRING"] else None

    s3.answer = large
    with pytest.raises(CloudDDPError, match=r"node 0: runs/a is 1099511627776 MiB, and .* MiB are free"):
        pulled(aws, to)
    assert not to.exists()
    assert reads(s3) == []


def test_report_of_a_node_is_read_if_it_is_one(aws: AWS, s3: S3) -> None:
    report = b'{"url": "s3://results/team/", "phase": "complete", "files": 3}'
    for node, body in enumerate((report, b"no report", report + b" " * (1 << 18))):
        s3.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/node-{node}/copied.json", Body=body)
        s3.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/node-{node}/logs/verdict.json", Body=b"{}")
    found = s3_pull.find(aws, PLACE)
    assert [one.report.files for one in found.values()] == [3, 0, 0]
    assert [one.report.phase.value for one in found.values()] == ["complete", "copying", "copying"]
    assert [[one.size for one in node.logs.values()] for node in found.values()] == [[2], [2], [2]]
