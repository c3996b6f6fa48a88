"""Files that a job wrote and that were not pulled: which files are listed, for which job, and until when."""

from __future__ import annotations

import json
import sys

import pytest
from support.agentnode import FOREVER, Node, until

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import (
    MAX_PLACES,
    NewFiles,
    NewFilesReply,
    NewFilesRequest,
    PulledRequest,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")


def new_files(
    node: Node, job: str = "", *, outputs: tuple[str, ...] = ("runs",), scratch: tuple[str, ...] = ()
) -> NewFilesReply:
    return node.call(NewFilesRequest("p", outputs, scratch, node.id(job) if job else ""))


def counts(found: NewFiles) -> dict[str, int]:
    return {path.name: path.files for path in found.paths}


def ran(node: Node, code: str, job: str = "job-1") -> None:
    node.start(code, job=job)
    assert node.follow(job).state.phase is JobPhase.SUCCEEDED


WRITE = (
    "import os, shutil\n"
    "def write(name, text='x'):\n"
    "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True)\n"
    "    with open(name, 'w') as file: file.write(text)\n"
)


def test_folder_that_is_moved_into_the_project_after_a_pull_is_new(node: Node) -> None:
    outside = node.project.parent / "far"
    ran(node, WRITE + f"write('runs/a'); write({str(outside / 'model.pt')!r})\n")
    node.call(PulledRequest("p", (".",), new_files(node).time_ns))
    assert new_files(node).jobs == ()
    ran(node, f"import os; os.rename({str(outside)!r}, 'runs/final')\n", job="job-2")
    found = {one.job: counts(one.outputs) for one in new_files(node).jobs}
    assert found[node.id("job-2")] == {"runs": 1}


def test_outputs_are_counted_apart_from_other_files(node: Node) -> None:
    (node.project / "before").mkdir()
    (node.project / "before" / "old").write_text("old")
    ran(node, WRITE + "write('runs/a/b'); write('out/x/y', 'four'); write('out/z'); write('model.pt')\n")
    reply = new_files(node)
    (one,) = reply.jobs
    assert (one.job, reply.rank_zero, reply.complete) == (node.id(), True, True)
    assert counts(one.outputs) == {"runs": 1}
    assert counts(one.others) == {"out/": 2, "model.pt": 1}
    assert (one.others.files, one.others.size) == (3, 6)


def test_caches_scratch_and_special_files_do_not_count(node: Node) -> None:
    (node.project / "file").write_text("x")
    assert new_files(node).jobs == (), "no job has run"
    caches = ("__pycache__/a.pyc", "pkg/b.pyc", ".pytest_cache/c", "deep/.ipynb_checkpoints/d", ".venv/lib/e")
    caches += (".conda/lib/e", "src/p.egg-info/PKG-INFO")
    files = (*caches, "venv/lib/e", "data/set", "../elsewhere")
    ran(node, WRITE + f"for name in {files!r}: write(name)\nos.mkfifo('pipe'); os.makedirs('empty/folder')\n")
    assert new_files(node, scratch=("data/",)).jobs == ()


def test_new_file_with_an_old_mtime_counts(node: Node) -> None:
    (node.project / "old").write_text("old")
    ran(
        node,
        WRITE
        + "write('kept'); os.utime('kept', (1, 1)); os.utime('old', (2, 2)); os.rename('old', 'moved')\n",
    )
    (one,) = new_files(node).jobs
    assert counts(one.others) == {"kept": 1, "moved": 1}


def test_synced_file_counts_only_after_a_job_changed_it(node: Node) -> None:
    node.probe()
    for name in ("same.py", "src/changed.py"):
        (node.project / name).parent.mkdir(exist_ok=True)
        (node.project / name).write_text("1")
    ran(node, WRITE + "write('src/changed.py', 'two'); write('src/new'); write('src/fresh/a')\n")
    manifest = {}
    for name in ("same.py", "src/changed.py"):
        info = (node.project / name).stat()
        manifest[name] = ["f", 0o644, 1, info.st_mtime_ns, ""]
    (node.store / "manifest-p.json").write_text(json.dumps(manifest))
    (node.project / "same.py").chmod(0o644)  # as a sync after the job: a new ctime
    (one,) = new_files(node).jobs
    assert counts(one.others) == {"src/changed.py": 1, "src/new": 1, "src/fresh/": 1}


def test_file_belongs_to_the_latest_job_that_could_have_written_it(node: Node) -> None:
    ran(node, WRITE + "write('runs/one'); write('runs/both')\n")
    ran(node, WRITE + "write('runs/two'); write('runs/both')\n", job="job-2")
    assert [(one.job, one.outputs.files) for one in new_files(node).jobs] == [
        (node.id(), 1),
        (node.id("job-2"), 2),
    ]
    assert [one.job for one in new_files(node, "job-2").jobs] == [node.id("job-2")]


def test_pulled_file_counts_again_only_after_a_change(node: Node) -> None:
    ran(node, WRITE + "write('runs/a'); write('out/b'); write('out/c'); write('d')\n")
    at = new_files(node).time_ns

    def mark(*names: str) -> None:
        assert node.call(PulledRequest("p", names, at)).recorded == len(names)

    mark("runs/", "out/b")
    (one,) = new_files(node).jobs
    assert (counts(one.outputs), counts(one.others)) == ({}, {"out/": 1, "d": 1})
    file = node.project / "runs" / "a"
    until(lambda: file.write_text("changed") and file.stat().st_ctime_ns >= at)  # its clock has a coarse tick
    assert counts(new_files(node).jobs[0].outputs) == {"runs": 1}
    at = new_files(node).time_ns + 10**9
    mark(".")
    assert new_files(node).jobs == ()


def test_running_job_is_reported(node: Node) -> None:
    node.start(FOREVER)
    assert new_files(node).running == (node.id(),)
    assert new_files(node, "job-2").running == ()


def test_reply_names_a_limited_number_of_paths(node: Node) -> None:
    ran(node, WRITE + "for k in range(3000): write(f'file {k}' + 'n' * 200)\n")
    (one,) = new_files(node).jobs
    assert (one.others.files, len(one.others.paths)) == (3000, MAX_PLACES)
