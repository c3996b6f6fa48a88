"""How a job ends on a node, in real processes: exit codes, the rank that failed first, failing launchers. And
why a rank has ended: what the kernel, NVIDIA's driver and torch have recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import WAITING, Node, alive, first_of, until
from support.gangs import Processes, freeze, thaw
from support.programs import first_on_path

from agent.node import store
from agent.ranks import attempt, causes
from agent.ranks.attempt import Attempt
from agent.ranks.causes import Kernel
from cloudddp.agent.protocol.gang import Observed
from cloudddp.agent.protocol.jobs import Cause, Failure, RankRecord, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

RANK_ZERO = {"RANK": "0"}


@pytest.mark.parametrize(
    ("code", "phase", "exit_code", "number"),
    [
        ("pass", JobPhase.SUCCEEDED, 0, None),
        ("raise SystemExit(7)", JobPhase.FAILED, 7, None),
        ("import os; os.abort()", JobPhase.FAILED, 134, 6),
    ],
)
def test_exit_code_is_that_of_the_rank(
    node: Node, code: str, phase: JobPhase, exit_code: int, number: int | None
) -> None:
    node.start(code)
    found = node.follow().state
    assert (found.phase, found.exit_code) == (phase, exit_code)
    (record,) = found.ranks
    assert (record.rank, record.exit_code, record.signal) == (0, exit_code, number)
    times: list[Any] = [found.started, record.ended, found.ended]
    assert times == sorted(times)


def test_rank_or_launcher_that_cannot_start_is_explained(node: Node) -> None:
    node.start(processes=[Process((), ("no-such-program",), RANK_ZERO)])
    found = node.follow()
    assert (found.state.exit_code, b"no-such-program" in found.logs[0]) == (127, True)
    node.start(processes=[Process(("/no/such/python",), ("x",), {})], job="job-2")
    state = node.follow("job-2").state
    assert (state.exit_code, first_of(state).cause) == (127, Cause.START)
    assert "/no/such/python" in first_of(state).detail


def test_launcher_that_ends_after_or_without_its_ranks(node: Node) -> None:
    """Its failure after them is ignored; without all of them, exit code 0 is a failure."""
    node.start(processes=[Process(("sh", "-c", '"$@"; exit 1', "sh"), ("true",), RANK_ZERO)])
    assert node.follow().state.phase is JobPhase.SUCCEEDED
    lacking = Process(("sh", "-c", '"$@"', "sh"), ("true",), RANK_ZERO)
    node.start(processes=[lacking], ranks=2, job="job-2")
    found = node.follow("job-2").state
    assert (found.phase, found.exit_code) == (JobPhase.FAILED, 1)


def test_ranks_run_in_the_project_with_their_arguments_and_environment_and_no_input(node: Node) -> None:
    words = ["--", "-x", "--job", "other", "--", "", "a b", "$(id)", "@RANK@", "\u00e9"]
    code = (
        "import json, os, sys\nenv = os.environ\n"
        "print(json.dumps([os.getcwd(), env['MINE'], env['RANK'], sys.stdin.read(), sys.argv[1:]]))"
    )
    name, mine = node.script(code), "a b'\"$x"
    node.start(processes=[Process((), (sys.executable, name, *words), RANK_ZERO)], env={"MINE": mine})
    assert json.loads(node.follow().logs[0]) == [str(node.project), mine, "0", "", words]


def test_wrapper_that_is_slow_to_record_the_end_of_its_rank(node: Node) -> None:
    """The node is busy, or the rank has much memory to free: that is no failure."""
    node.start(WAITING)
    found = Processes(node)
    freeze(*found.wrappers)
    (node.project / "go").touch()
    until(lambda: not alive(found.ranks[0]))
    time.sleep(4)  # longer than a failure for want of another rank is left open
    thaw(*found.wrappers)
    until(lambda: node.state().phase.ended)
    assert node.state().phase is JobPhase.SUCCEEDED


# -- what a look at the ranks of an attempt finds, whatever happens during the look --------------------------


class EndsWhenAsked(subprocess.Popen[bytes]):
    """A launcher that ends right after it was asked `polls` times whether it has."""

    polls = 0

    def poll(self) -> int | None:
        if self.polls:
            self.polls -= 1
            return None
        self.wait()
        return self.returncode


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    (tmp_path / "job" / "ranks").mkdir(parents=True)
    return tmp_path / "job"


@pytest.fixture
def attempted(job_folder: Path, tmp_path: Path) -> Attempt:
    return Attempt(Node(tmp_path / "home").starting("", max_restarts=0), job_folder, 0)


@pytest.mark.parametrize("polls", range(4))
def test_launcher_that_fails_during_a_look_has_failed(attempted: Attempt, polls: int) -> None:
    """If it had just ended, the ranks of the other nodes would run forever."""
    with EndsWhenAsked([sys.executable, "-c", "raise SystemExit(1)"]) as child:
        child.polls = polls
        attempted._children.append(child)
        failed, _ = until(lambda: any(look := attempted.look()) and look)
    assert failed


def test_record_that_is_replaced_in_the_tick_in_which_it_was_read_is_read_again(
    attempted: Attempt, job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "TICK", 10**12)
    own = RankRecord(0, None, None, pid=os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        attempted._children.append(child)
        store.write(job_folder / "ranks" / "0.json", own)
        tick = (job_folder / "ranks").stat().st_mtime_ns
        assert attempted.look() == (False, False)
        store.write(job_folder / "ranks" / "0.json", RankRecord(0, 3, 1.0, at=1.0))
        os.utime(job_folder / "ranks", ns=(tick, tick))
        assert attempted.look() == (True, False)
        child.communicate(b"\n")


# -- what the kernel, NVIDIA's driver and torch have recorded ------------------------------------------------


FAILED = RankRecord(3, 1, time.time(), pid=10, at=time.monotonic())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a job with the log of rank 3."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "3.log").write_text(
        "step 1\nRuntimeError: CUDA error: unspecified launch failure\n"
    )
    return tmp_path


@pytest.fixture
def kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `dmesg` prints, on a machine with NVIDIA's driver."""
    first_on_path(monkeypatch, tmp_path / "bin" / "dmesg", f"cat {tmp_path}/kernel.log")
    monkeypatch.setattr(causes, "DRIVER", str(tmp_path))
    return tmp_path / "kernel.log"


def test_error_of_the_driver_since_the_job_began(folder: Path, kernel_log: Path) -> None:
    kernel_log.write_text(
        "[   50.000001] NVRM: Xid (PCI:0000:10:1c): 31, pid=7, name=python\n"
        "[  101.000000] systemd[1]: Started Session 4 of User ubuntu.\n"
        "[  102.500000] NVRM: Xid (PCI:0000:a0:1d): 79, pid=10, name=python, GPU has fallen off the bus.\n"
        "[  102.500002] NVRM: Xid (PCI:0000:a0:1d): 79, pid=10, name=python, GPU has fallen off the bus.\n"
    )
    xid = "NVIDIA driver: Xid 79 (PCI:0000:a0:1d)"
    found = causes.of_rank(folder, 1, FAILED, Kernel(0, 100.0))
    assert (found.failure.cause, found.failure.detail) == (Cause.RANK, xid)
    assert found.last_lines[-1] == "RuntimeError: CUDA error: unspecified launch failure"
    error = replace(FAILED, error="RuntimeError: CUDA error")
    found = causes.of_rank(folder, 1, error, Kernel(0, 100.0))
    assert found.failure.detail == f"{xid}; RuntimeError: CUDA error"
    kernel_log.write_text("[   50.000001] NVRM: Xid (PCI:0000:10:1c): 31, pid=7, name=python\n")
    assert causes.of_rank(folder, 1, FAILED, Kernel(0, 100.0)).failure.detail == "", "it is older"


@pytest.mark.parametrize(
    ("killed", "number", "cause"),
    [(1, signal.SIGKILL, Cause.MEMORY), (0, signal.SIGKILL, Cause.RANK), (1, signal.SIGSEGV, Cause.RANK)],
)
def test_oom_killer_is_the_cause_if_it_has_ended_a_process_since_the_job_began(
    folder: Path, killed: int, number: int, cause: Cause
) -> None:
    """`killed`: how many processes it has ended since. /proc/vmstat counts those of the machine."""
    before = Kernel.now()
    record = replace(FAILED, exit_code=128 + number, signal=number)
    found = causes.of_rank(folder, 0, record, replace(before, oom_kills=before.oom_kills - killed))
    assert found.failure.cause is cause


@pytest.mark.parametrize(
    ("code", "before", "cause"),
    [(-int(signal.SIGKILL), -1, Cause.MEMORY), (-int(signal.SIGKILL), 1 << 40, Cause.LAUNCHER)],
)
def test_oom_killer_is_named_as_the_cause_of_a_killed_launcher(
    tmp_path: Path, code: int, before: int, cause: Cause
) -> None:
    (tmp_path / "ranks").mkdir()
    found = causes.of_launcher(tmp_path, 3, code, Kernel(before, 0.0))
    assert (found.failure.cause, found.failure.node, found.failure.rank) == (cause, 3, None)


def ended(node: Node) -> Verdict:
    state = node.ended()
    assert state.verdict is not None
    assert state.phase is JobPhase.FAILED
    return state.verdict


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("print('finished')", (Cause.EXIT, 134, 6, "")),
        ("raise ValueError('x')", (Cause.RANK, 1, None, "ValueError: x; its process aborted while exiting")),
    ],
)
def test_process_that_aborts_while_it_exits(
    node: Node, last: str, expected: tuple[Cause, int, int | None, str]
) -> None:
    """As gloo's threads do without destroy_process_group, now and then."""
    node.start(f"import atexit, os\natexit.register(os.abort)\n{last}\n", retries=int("finished" in last))
    verdict = ended(node)
    first = first_of(verdict)
    assert (first.cause, first.exit_code, first.signal, first.detail) == expected
    assert verdict.restarts == 0


def test_stack_of_the_thread_that_crashed_is_at_the_end(node: Node) -> None:
    """faulthandler writes those of all other threads before it."""
    thread = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    script = f"import ctypes, threading, time\nprint('before', flush=True)\nfor _ in range(20): {thread}\n"
    node.start(f"{script}ctypes.string_at(0)\n", env={"PYTHONFAULTHANDLER": "1"})
    last = "\n".join(ended(node).last_lines)
    assert [part for part in ("before", "Current thread", "in <module>") if part not in last] == []


def test_lost_connection_is_no_cause_beside_an_own_exception() -> None:
    own = ("Traceback (most recent call last):", "ValueError: x")
    gloo = ("terminate called after throwing an instance of 'gloo::IoException'", "  what():  broken pipe")
    failure = Failure(0, Cause.RANK, 0, 134, 6)
    assert causes.is_consequence(Observed(failure, 0.0, gloo))
    assert not causes.is_consequence(Observed(failure, 0.0, (*own, *gloo)))


ERROR = '{"message": {"message": "ValueError: labels out of range", "extraInfo": {"timestamp": "179546"}}}'


def test_error_file_of_torch_elastic_is_the_detail_of_the_cause(node: Node) -> None:
    """The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler."""
    file = "os.environ['TORCHELASTIC_ERROR_FILE'], 'w'"
    node.start(f"import os, sys\nopen({file}).write({ERROR!r})\nsys.exit(1)\n")
    first = first_of(ended(node))
    assert (first.rank, first.exit_code, first.detail) == (0, 1, "ValueError: labels out of range")


@pytest.mark.parametrize(("text", "detail"), [("{", ""), ('{"message": 3}', "3")])
def test_error_file_in_another_format(tmp_path: Path, text: str, detail: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert causes.elastic_error(str(tmp_path / "error.json")) == detail
