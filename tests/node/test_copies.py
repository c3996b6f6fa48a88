"""Copies of a job's results to S3, as the agent makes them: against moto's S3, with the boto3 of the ranks'
Python."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node, until
from support.buckets import ROOT, objects
from support.exposed import files_with
from support.imds import Metadata, given_a_role
from support.programs import program
from support.s3_server import S3, refusal

from cloudddp.agent.protocol.copies import Copied, CopyPhase, Destination
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.start import Deadline, Process

BUCKET, PREFIX = "results", "team a/runs/c/job"
DONE = (CopyPhase.COMPLETE, CopyPhase.INCOMPLETE)
WRITE = "import os; os.makedirs('runs', exist_ok=True)\n"


@pytest.fixture
def node(node: Node, s3: S3) -> Iterator[Node]:
    """A node with a role, whose S3 is that server."""
    with given_a_role(node, s3.url):
        yield node
        assert not node.end()  # it may still copy


TO = Destination(BUCKET, PREFIX, ("runs",), limit=120.0, patience=60.0)


def ended(node: Node) -> JobState:
    return until(lambda: (found := node.state()).copied is not None and found.copied.phase in DONE and found)


def copied(node: Node, *scripts: str, **changes: Any) -> Copied:
    """Run a job, and return what was copied when it has ended."""
    node.start(*scripts, **{"results": TO, **changes})
    found = ended(node).copied
    assert found is not None
    return found


def keys(s3: S3) -> dict[str, int]:
    """What is in S3, by the path below the node's prefix."""
    beginning = f"{PREFIX}/node-0/"
    found = objects(s3.client, BUCKET)
    assert all(key.startswith(beginning) for key in found)
    return {key.removeprefix(beginning): size for key, size in found.items()}


def body(s3: S3, name: str) -> bytes:
    return bytes(s3.client.get_object(Bucket=BUCKET, Key=f"{PREFIX}/node-0/{name}")["Body"].read())


def test_outputs_logs_and_verdict_are_copied(node: Node, s3: S3) -> None:
    """Names are escaped, a large file is sent in parts, links are kept inside the outputs and followed
    elsewhere."""
    names = ["a b", "a+b", "a%20b", "é", "a&b=c?d#e", "'quoted\"", "~x", "日本", "a;b,c:d@e", "back\\slash"]
    size = (40 << 20) + 3
    (node.home / "secret").write_text("secret")
    found = copied(
        node,
        WRITE
        + "print('hello'); open('runs/model.pt', 'w').write('weights'); open('other', 'w')\n"
        + f"for number, name in enumerate({names!r}): open('runs/' + name, 'w').write(str(number))\n"
        + "open(b'runs/\\xff', 'w').write('bytes'); open('runs/a\\nb', 'w').write('line')\n"
        + f"open('runs/large', 'wb').write(bytes(range(256)) * ({size} // 256) + b'end')\n"
        + "os.symlink('model.pt', 'runs/last'); os.symlink('../../secret', 'runs/out')\n"
        + "os.symlink('/etc/passwd', 'runs/passwd'); os.symlink('../..', 'runs/folder')\n"
        + "os.mkfifo('runs/pipe')\n"
        + "os.mkdir('../far'); open('../far/model', 'w').write('far'); os.symlink('../../far', 'runs/far')\n",
    )
    # `pull` would not bring what is left out either.
    assert (found.phase, found.error, found.left_out) == (CopyPhase.COMPLETE, "", 4)
    assert any(note.startswith("runs/out: a link to") for note in found.notes), found.notes
    assert found.url == f"s3://{BUCKET}/{PREFIX}/node-0/"
    assert found.rank_zero
    until(lambda: "copied.json" in keys(s3))
    assert body(s3, "logs/ranks/0.log").startswith(b"hello")
    for name, key, phase in (("logs/verdict", "phase", "succeeded"), ("logs/state", "state", "succeeded")):
        assert json.loads(body(s3, f"{name}.json"))[key] == phase
    assert json.loads(body(s3, "copied.json"))["phase"] == "complete"
    outputs = {name.partition("outputs/")[2] for name in keys(s3) if "outputs/" in name}
    plain = {"model.pt", "large", "last", "far/model", "\\udcff", "a\\nb"}
    assert outputs == {f"runs/{name}" for name in (*names, *plain)}
    assert found.files == found.expected == len(keys(s3)) - 1
    contents = {name: str(number) for number, name in enumerate(names)}
    for name, text in {**contents, "model.pt": "weights", "\\udcff": "bytes", "a\\nb": "line"}.items():
        assert body(s3, f"outputs/runs/{name}") == text.encode(), name
    assert body(s3, "outputs/runs/large") == bytes(range(256)) * (size // 256) + b"end"
    assert sum("partNumber=" in one for one in s3.requests) == 3
    link = s3.client.head_object(Bucket=BUCKET, Key=f"{PREFIX}/node-0/outputs/runs/last")
    assert (link["ContentLength"], link["Metadata"]["link"]) == (0, "model.pt")


def test_copy_without_all_results_of_a_failed_job_is_incomplete(node: Node, s3: S3) -> None:
    code = WRITE + (
        "open('runs/a\\nb', 'w'); open('runs/a\\\\nb', 'w')\n"
        "deep = 'runs/' + ('d' * 200 + '/') * 5; os.makedirs(deep); open(deep + 'x', 'w')\n"
        "raise SystemExit(3)"
    )
    found = copied(node, code)
    assert b'"exit_code": 3' in body(s3, "logs/verdict.json")
    assert (found.phase, found.left_out) == (CopyPhase.INCOMPLETE, 2), found.notes
    assert any("its key in S3 is that of another file" in note for note in found.notes)
    assert any("longer than 1024 bytes" in note for note in found.notes)


def test_log_whose_middle_was_dropped_is_copied_without_the_hole(node: Node, s3: S3) -> None:
    """As a pull brings it; a file that would be many zeros is left out there, too."""
    line = "x" * 63
    found = copied(
        node,
        f"import os\nos.write(1, b'first\\n')\nfor _ in range(1000): os.write(1, b'{line}\\n' * 1000)\n"
        "os.write(1, b'last\\n')\n"
        "open(os.readlink('/proc/self/fd/1') + '.sparse', 'w').truncate(200 << 20)",
        log_mb=1,
    )
    log = body(s3, "logs/ranks/0.log")
    assert len(log) <= 1 << 20
    assert found.size < 2 << 20
    assert (log[:6], log[-5:], b"\0" in log) == (b"first\n", b"last\n", False)
    assert b"bytes of this log were dropped here" in log
    assert "logs/ranks/0.log.sparse" not in keys(s3)
    assert found.notes == ("ranks/0.log.sparse: 200 MiB, of which 0 MiB were written",)
    assert found.phase is CopyPhase.INCOMPLETE


DENIED = refusal("403 Forbidden", "AccessDenied", "User: x is not authorized")


def test_node_whose_results_are_not_in_s3_stays_for_a_pull(node: Node, s3: S3) -> None:
    """A copy that is denied ends at once."""
    s3.answer = lambda _: DENIED
    found = copied(node, WRITE + "open('runs/model', 'w').write('weights')", poweroff=100.0, keep=300.0)
    assert found.phase is CopyPhase.INCOMPLETE
    assert found.error == "AccessDenied: User: x is not authorized"
    assert len(set(s3.requests)) == len(s3.requests), "none is repeated"
    plan = node.store / "poweroff.json"
    until(lambda: json.loads(plan.read_text())["seconds"] == 300.0)


def test_node_without_role_is_reported(node: Node, metadata: Metadata) -> None:
    metadata.found["placement/region"] = "us-east-1"
    found = copied(node, "pass")
    assert found.error == "the node has no credentials: no instance profile with a role is attached to it"


def test_failed_requests_are_repeated(node: Node, s3: S3) -> None:
    """More often than boto3 repeats them by itself; what has arrived is not sent again."""
    failures = 6

    def busy(environ: dict[str, Any]) -> tuple[str, bytes] | None:
        nonlocal failures
        if not environ["PATH_INFO"].endswith("/model.pt") or failures == 0:
            return None
        failures -= 1
        return refusal("503 Slow Down", "SlowDown")

    s3.answer = busy
    found = copied(node, WRITE + "open('runs/model.pt', 'w').write('weights'); open('runs/a', 'w')")
    assert (found.phase, failures) == (CopyPhase.COMPLETE, 0)
    assert body(s3, "outputs/runs/model.pt") == b"weights"
    assert sum("/outputs/runs/a?" in one for one in s3.requests) == 1


def test_only_regular_files_that_stay_the_same_are_copied(s3: S3, tmp_path: Path) -> None:
    """A rank may replace any name between the choice of the files and their upload."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "grows").write_text("a")
    names = ["file", "link", "pipe", "grows", "missing"]

    def grow(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"].endswith("/grows"):
            (tmp_path / "grows").write_text("ab")

    s3.answer = grow
    files = [
        {"number": number, "path": f"{tmp_path}/{name}", "key": name, "metadata": {}, "is_log": True}
        for number, name in enumerate(names)
    ]
    env = {
        "PYTHONPATH": str(ROOT / "infra" / "node"),
        "AWS_ENDPOINT_URL_S3": s3.url,
        "AWS_ACCESS_KEY_ID": "a",
    }
    out = subprocess.check_output(
        [sys.executable, "-c", "from agent.s3 import upload; upload.main()"],
        input=json.dumps({"bucket": BUCKET, "seconds": 30.0, "files": files}).encode(),
        env={**env, "AWS_SECRET_ACCESS_KEY": "b", "CLOUDDDP_METADATA": "127.0.0.1:1"},  # there is none
    )
    found = [json.loads(line) for line in out.splitlines() if line]
    assert {one["number"]: one.get("size") or one["lost"] for one in found} == {
        0: 4,
        1: "Too many levels of symbolic links",
        2: "not a regular file",
        3: "it changed while it was copied",
        4: "No such file or directory",
    }


def test_credentials_are_those_of_the_role_and_stay_in_the_upload(node: Node, s3: S3) -> None:
    """Not those of the user's environment; and no other process and no file has them."""
    node.variables |= {"AWS_ACCESS_KEY_ID": "AKIAUSER", "AWS_SECRET_ACCESS_KEY": "user"}
    seen: list[str] = []
    exposed: list[str] = []

    def look(environ: dict[str, Any]) -> None:
        seen.append(environ["HTTP_AUTHORIZATION"])
        for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if b"s3cret-of-the-role" in data or b"token-of-the-role" in data:
                    exposed.append(str(path))

    s3.answer = look
    copied(node, "print(1)")
    assert seen
    assert all("Credential=ASIAROLE/" in one for one in seen if "Credential=a/" not in one)
    assert exposed == []
    assert files_with("s3cret-of-the-role", node.home) == []


def test_copy_to_a_server_that_does_not_answer_ends_before_the_deadline(node: Node, s3: S3) -> None:
    wait = threading.Event()

    def hang(_: dict[str, Any]) -> None:
        wait.wait(60)

    s3.answer = hang
    found = copied(node, "pass", deadline=Deadline(9.0, "12:00"), save=0.0)
    wait.set()
    assert "the time is over" in found.error


def test_python_without_boto3_is_reported(node: Node, tmp_path: Path) -> None:
    """The last candidate is the system's Python: this test needs one that lacks it."""
    program(tmp_path / "python3", "exit 0")
    node.variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    if Path("/opt/pytorch/bin/python").exists():
        pytest.skip("this computer has a Python in /opt/pytorch")
    found = copied(node, processes=[Process((), ("/bin/true",), {"RANK": "0"})])
    assert found.error.startswith(
        "no Python on the node has boto3 (looked at /bin/true, /opt/pytorch/bin/python, python3)"
    )
