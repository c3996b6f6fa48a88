"""Files in a node's store that a script has damaged or replaced: they concern their job only, and no step
waits for them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from support.agentnode import FOREVER, Node, gone

from cloudddp.agent.protocol import VERSION
from cloudddp.agent.protocol.copies import CopyPhase
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import TrainingState
from cloudddp.agent.protocol.results import NewFilesRequest

BEFORE_1970 = (-1e9, -1e9)
REPORT = "import os\nopen(os.environ['CLOUDDDP_STATUS_FILE'], 'w').write('{\"state\": \"finished\"}')\n"


def ended(node: Node, job: str = "job-1", code: str = "print('ran')") -> Path:
    """Run a job to its end; return its folder."""
    node.start(code, job=job)
    assert node.follow(job).state.phase.ended
    return node.folder(job)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def phases(node: Node) -> dict[str, JobPhase]:
    return {one.job: one.phase for one in node.jobs()}


def test_files_from_before_1970_are_reported(node: Node) -> None:
    folder = ended(node, code=REPORT + f"os.utime(os.environ['CLOUDDDP_STATUS_FILE'], {BEFORE_1970})\n")
    for training in (node.state().training, node.follow().state.training, node.cancel().training):
        assert training is not None
        assert (training.state, training.reported) == (TrainingState.FINISHED, 0.0)
    assert (folder / "status.json").stat().st_mtime < 0
    (folder / "cancel").touch()
    os.utime(folder / "cancel", BEFORE_1970)
    assert node.state().cancelled == 0.0


def test_record_out_of_range_loses_its_job_only(node: Node) -> None:
    ended(node, "job-2")
    state = ended(node) / "state.json"
    change(state, job="../../other")
    both = {node.id(): JobPhase.SUCCEEDED, node.id("job-2"): JobPhase.SUCCEEDED}
    assert phases(node) == both, "it is reported as its own"
    right = state.read_text()
    out_of_range = {"exit_code": 999, "started": -1, "ended": 1e300, "expected": 10**6, "state": "x"}
    for name, value in out_of_range.items():
        change(state, **{name: value})
        assert phases(node) == {**both, node.id(): JobPhase.LOST}
        state.write_text(right)
    change(state, node=-1)
    assert node.follow().logs == {0: b"ran\n"}
    assert node.cancel().left == 0
    # A process that has ended and one that was never recorded must not look alike.
    state.write_text(json.dumps({"job": node.id(), "node": 1, "state": "running"}))
    assert phases(node) == {**both, node.id(): JobPhase.LOST}
    assert node.probe().running == ()
    ended(node, "job-3")


def test_folder_that_is_not_named_by_a_job_id_is_skipped(node: Node) -> None:
    ended(node)
    for name in ("zz_x", "..x", "²", "zzz"):
        folder = node.store / "jobs" / name
        folder.mkdir()
        (folder / "job.json").write_text('{"node": 0, "ranks": 1}')
    (node.project / "model.pt").write_text("weights")
    assert phases(node) == {node.id(): JobPhase.SUCCEEDED}
    assert node.probe().running == ()
    assert {job.job for job in node.call(NewFilesRequest("p", (), ())).jobs} == {node.id()}


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def test_records_that_are_no_files_do_not_stop_a_step(node: Node) -> None:
    """It would wait for a pipe, and read forever from others."""
    folder = ended(node)
    names = ("job.json", "status.json", "ranks/0.json", "state.json")
    for put, replaced, phase in (
        (os.mkfifo, names[:-1], JobPhase.SUCCEEDED),
        (zero, names[:-1], JobPhase.SUCCEEDED),
        (huge, names[:-1], JobPhase.SUCCEEDED),
        (os.mkfifo, names, JobPhase.LOST),
        (Path.mkdir, names, JobPhase.LOST),
    ):
        for name in replaced:
            (folder / name).unlink(missing_ok=True)
            put(folder / name)
        begin = time.monotonic()
        assert phases(node) == {node.id(): phase}
        assert time.monotonic() - begin < 40, "a step waited for the file"
    assert node.follow().logs == {0: b"ran\n"}
    assert node.cancel().left == 0
    assert node.probe().running == ()
    ended(node, "job-2")


def test_logs_that_are_no_file_and_files_that_no_rank_has_are_skipped(node: Node) -> None:
    ranks = ended(node) / "ranks"
    for stem in ("x", "-1", "007", "²", "1e3", "999999", "9" * 100):
        (ranks / f"{stem}.log").write_text("false\n")
        (ranks / f"{stem}.json").write_text((ranks / "0.json").read_text())
    found = node.follow()
    assert (found.logs, len(found.state.ranks)) == ({0: b"ran\n"}, 1)
    for put in (os.mkfifo, zero):
        (ranks / "0.log").unlink()
        put(ranks / "0.log")
        assert node.follow().logs == {}


def test_ranks_beyond_the_most_that_a_node_has_are_skipped(node: Node) -> None:
    folder = ended(node)
    for rank in range(1, 300):
        (folder / "ranks" / f"{rank}.log").write_text("x")
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps({"rank": rank, "exit_code": 0, "ended": 1}))
    assert len(node.state().ranks) == 256
    assert len(node.follow().logs) == 256


def test_version_that_is_no_number_or_no_file_is_replaced(node: Node) -> None:
    node.probe()
    version = node.store / "version"
    for text in ("²", "٣", "9" * 5000, "-1", "1_0"):
        version.write_text(text)
        assert node.jobs() == ()
        assert version.read_text() == f"{VERSION}\n"
    for put in (os.mkfifo, zero, huge):
        version.unlink()
        put(version)
        assert node.jobs() == ()
        assert version.read_text() == f"{VERSION}\n"


ENDED_PID = 2**22 + 1  # no process has it


def test_setup_without_a_process_is_lost(node: Node) -> None:
    folder = node.folder()
    folder.mkdir(parents=True)
    record = {"job": node.id(), "node": 0, "state": "setup", "script": "s", "started": 1.0, "pid": ENDED_PID}
    (folder / "state.json").write_text(json.dumps(record))
    (job,) = node.jobs()
    assert (job.phase, job.setup) == (JobPhase.LOST, True)
    assert node.probe().running == ()
    ended(node, "job-2")


def test_list_of_files_that_is_no_file_is_empty_and_a_name_with_a_nul_is_dropped(node: Node) -> None:
    ended(node)
    for name, put in (("pending-p.json", os.mkfifo), ("results-p.json", zero), ("manifest-p.json", huge)):
        put(node.store / name)
    assert node.probe(manifest_digest="0" * 64).differs
    assert node.call(NewFilesRequest("p", (), ())).complete
    (node.store / "manifest-p.json").write_text('{"a\\u0000b": ["f", 420, 0, 0, ""]}')
    assert node.probe(manifest_digest="0" * 64).differs


def test_job_whose_records_are_unreadable_can_be_cancelled(node: Node) -> None:
    node.start(FOREVER)
    node.rank_pid()
    (node.folder() / "job.json").write_text("{}")
    assert node.probe().running == (node.id(),)
    answer = node.cancel()
    assert (answer.left, answer.phase) == (0, JobPhase.CANCELLED)


def test_verdict_with_the_exit_code_of_another_is_none_and_an_ended_copy_is_incomplete(node: Node) -> None:
    folder = ended(node, code="raise SystemExit(3)")
    for phase, code in (("failed", 0), ("cancelled", 0), ("succeeded", 3)):
        change(folder / "verdict.json", phase=phase, exit_code=code)
        assert node.state().verdict is None
    (folder / "copied.json").write_text(json.dumps({"url": "s3://b/p/", "phase": "copying", "files": 3}))
    gone(node.home)  # the agent that copied was killed
    found = node.state().copied
    assert found is not None
    assert (found.phase, found.files) == (CopyPhase.INCOMPLETE, 3)
