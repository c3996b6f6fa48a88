"""Files that a job has written and nobody has pulled: which count, where they are said to be, what marks them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from agentnode import Node, until

from cloudddp import protocol

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")


def new(
    node: Node, job: str = "", *, outputs: tuple[str, ...] = ("runs",), scratch: tuple[str, ...] = ()
) -> Any:
    asked = json.dumps({"outputs": outputs, "scratch": scratch}).encode()
    done = node.call("new", "--project=p", f"--job={node.id(job) if job else ''}", stdin=asked)
    assert done.returncode == 0, done.stderr.decode()
    return protocol.decode(done.stdout, protocol.NewReply)


def places(found: protocol.Found) -> dict[str, int]:
    return {place.name: place.files for place in found.places}


def ran(node: Node, code: str, job: str = "job-1") -> None:
    node.start(code, job=job)
    assert node.follow(job).state["state"] == "succeeded"


WRITE = (
    "import os, shutil\n"
    "def write(name, text='x'):\n"
    "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True)\n"
    "    with open(name, 'w') as file: file.write(text)\n"
)


def test_files_below_the_outputs_are_told_from_others(node: Node) -> None:
    (node.project / "before").mkdir()
    (node.project / "before" / "old").write_text("old")
    ran(node, WRITE + "write('runs/a/b'); write('out/x/y', 'four'); write('out/z'); write('model.pt')\n")
    reply = new(node)
    (one,) = reply.jobs
    assert (one.job, reply.rank_zero, reply.complete) == (node.id(), True, True)
    assert places(one.outputs) == {"runs": 1}
    assert places(one.others) == {"out/": 2, "model.pt": 1}
    assert (one.others.files, one.others.size) == (3, 6)


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "write('__pycache__/a.pyc')",
        "write('pkg/b.pyc')",
        "write('.pytest_cache/c')",
        "write('deep/.ipynb_checkpoints/d')",
        "write('.venv/lib/e')",
        "write('venv/lib/e')",
        "write('data/set')",
        "write('../elsewhere')",
        "os.mkfifo('pipe')",
        "os.makedirs('empty/folder')",
    ],
)
def test_caches_scratch_and_what_is_no_file_do_not_count(node: Node, code: str) -> None:
    ran(node, WRITE + code + "\n")
    assert new(node, scratch=("data/",)).jobs == ()


def test_a_file_with_an_old_time_counts_as_new(node: Node) -> None:
    (node.project / "old").write_text("old")
    ran(
        node,
        WRITE
        + "write('kept'); os.utime('kept', (1, 1)); os.utime('old', (2, 2)); os.rename('old', 'moved')\n",
    )
    (one,) = new(node).jobs
    assert places(one.others) == {"kept": 1, "moved": 1}


def test_what_a_sync_has_brought_counts_only_once_a_job_has_changed_it(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    for name in ("same.py", "src/changed.py"):
        (node.project / name).parent.mkdir(exist_ok=True)
        (node.project / name).write_text("1")
    ran(node, WRITE + "write('src/changed.py', 'two'); write('src/new'); write('src/fresh/a')\n")
    manifest = {}
    for name in ("same.py", "src/changed.py"):
        info = (node.project / name).stat()
        manifest[name] = ["f", 0o644, 1, info.st_mtime_ns, ""]
    (node.home / ".cloudddp" / "manifest-p.json").write_text(json.dumps(manifest))
    (node.project / "same.py").chmod(0o644)  # as a sync after the job: a new ctime
    (one,) = new(node).jobs
    assert places(one.others) == {"src/changed.py": 1, "src/new": 1, "src/fresh/": 1}


def test_each_file_belongs_to_the_job_that_was_the_last_to_begin(node: Node) -> None:
    ran(node, WRITE + "write('runs/one'); write('runs/both')\n")
    ran(node, WRITE + "write('runs/two'); write('runs/both')\n", job="job-2")
    assert [(one.job, one.outputs.files) for one in new(node).jobs] == [(node.id(), 1), (node.id("job-2"), 2)]
    assert [one.job for one in new(node, "job-2").jobs] == [node.id("job-2")]


def test_what_was_pulled_is_not_named_again_until_it_changes(node: Node) -> None:
    ran(node, WRITE + "write('runs/a'); write('out/b'); write('out/c'); write('d')\n")
    at = new(node).at

    def mark(*names: str) -> None:
        answer = node.answer("pulled", "--project=p", f"--at={at}", stdin={"names": names})
        assert answer == {"marked": len(names)}

    mark("runs/", "out/b")
    (one,) = new(node).jobs
    assert (places(one.outputs), places(one.others)) == ({}, {"out/": 1, "d": 1})
    file = node.project / "runs" / "a"
    until(lambda: file.write_text("changed") and file.stat().st_ctime_ns >= at)  # its clock has a coarse tick
    assert places(new(node).jobs[0].outputs) == {"runs": 1}
    at = new(node).at + 10**9
    mark(".")
    assert new(node).jobs == ()


def test_a_job_that_runs_is_named(node: Node) -> None:
    node.start("import time\nwhile True: time.sleep(0.05)\n")
    assert new(node).running == (node.id(),)
    assert new(node, "job-2").running == ()


def test_a_node_without_jobs_holds_nothing(node: Node) -> None:
    (node.project / "file").write_text("x")
    assert new(node).jobs == ()


def test_an_answer_is_bounded_whatever_a_job_writes(node: Node) -> None:
    ran(node, WRITE + "for k in range(3000): write(f'file {k}' + 'n' * 200)\n")
    (one,) = new(node).jobs
    assert (one.others.files, len(one.others.places)) == (3000, protocol.MAX_PLACES)
