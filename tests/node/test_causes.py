"""Why a rank has ended: what the kernel, NVIDIA's driver and torch have recorded."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import Node

from agent.ranks import causes
from agent.ranks.causes import Kernel
from cloudddp.agent.protocol.jobs import Cause, Failure, RankRecord, Verdict
from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

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
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dmesg"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/kernel.log\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(causes, "DRIVER", str(tmp_path))
    return tmp_path / "kernel.log"


def test_error_of_the_driver_since_the_job_began(folder: Path, kernel_log: Path) -> None:
    kernel_log.write_text(
        "[   50.000001] NVRM: Xid (PCI:0000:10:1c): 31, pid=7, name=python\n"
        "[  101.000000] systemd[1]: Started Session 4 of User ubuntu.\n"
        "[  102.500000] NVRM: Xid (PCI:0000:a0:1d): 79, pid=10, name=python, GPU has fallen off the bus.\n"
        "[  102.500002] NVRM: Xid (PCI:0000:a0:1d): 79, pid=10, name=python, GPU has fallen off the bus.\n"
    )
    found = causes.of_rank(folder, 1, FAILED, Kernel(0, 100.0))
    assert (found.failure.cause, found.failure.detail) == (
        Cause.RANK,
        "NVIDIA driver: Xid 79 (PCI:0000:a0:1d)",
    )
    assert found.last_lines[-1] == "RuntimeError: CUDA error: unspecified launch failure"
    error = replace(FAILED, error="RuntimeError: CUDA error")
    assert causes.of_rank(folder, 1, error, Kernel(0, 100.0)).failure.detail == (
        "NVIDIA driver: Xid 79 (PCI:0000:a0:1d); RuntimeError: CUDA error"
    )


def test_driver_without_errors_is_no_cause(folder: Path, kernel_log: Path) -> None:
    kernel_log.write_text("[   50.000001] NVRM: Xid (PCI:0000:10:1c): 31, pid=7, name=python\n")
    assert causes.of_rank(folder, 1, FAILED, Kernel(0, 100.0)).failure.detail == ""


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
    [
        (-int(signal.SIGKILL), -1, Cause.MEMORY),  # the kernel has counted a kill since
        (-int(signal.SIGKILL), 1 << 40, Cause.LAUNCHER),
        (-int(signal.SIGSEGV), -1, Cause.LAUNCHER),
        (1, -1, Cause.LAUNCHER),
    ],
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
        ("os.abort()", (Cause.RANK, 134, 6, "")),
    ],
)
def test_process_that_aborts_while_it_exits(
    node: Node, last: str, expected: tuple[Cause, int, int | None, str]
) -> None:
    """As gloo's threads do without destroy_process_group, now and then."""
    node.start(f"import atexit, os\natexit.register(os.abort)\n{last}\n", retries=int("finished" in last))
    verdict = ended(node)
    first = verdict.first
    assert first is not None
    assert (first.cause, first.exit_code, first.signal, first.detail) == expected
    assert verdict.restarts == 0


def test_stack_of_the_thread_that_crashed_is_at_the_end(node: Node) -> None:
    """faulthandler writes those of all other threads before it."""
    script = "import ctypes, threading, time\nprint('before', flush=True)\nfor _ in range(20):\n"
    script += (
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nctypes.string_at(0)\n"
    )
    node.start(script, env={"PYTHONFAULTHANDLER": "1"})
    last = "\n".join(ended(node).last_lines)
    assert "before" in last
    assert "Current thread" in last
    assert "in <module>" in last


def test_lost_connection_is_no_cause_beside_an_own_exception() -> None:
    own = ("Traceback (most recent call last):", "ValueError: x")
    gloo = ("terminate called after throwing an instance of 'gloo::IoException'", "  what():  broken pipe")
    failure = Failure(0, Cause.RANK, 0, 134, 6)
    assert causes.is_consequence(failure, gloo)
    assert not causes.is_consequence(failure, (*own, *gloo))


ERROR = (
    '{"message": {"message": "ValueError: labels out of range", "extraInfo": {"timestamp": "1795460000"}}}'
)


def test_error_file_of_torch_elastic_is_the_detail_of_the_cause(node: Node) -> None:
    """The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler."""
    file = "os.environ['TORCHELASTIC_ERROR_FILE'], 'w'"
    node.start(f"import os, sys\nopen({file}).write({ERROR!r})\nsys.exit(1)\n")
    first = ended(node).first
    assert first is not None
    assert (first.rank, first.exit_code, first.detail) == (0, 1, "ValueError: labels out of range")


@pytest.mark.parametrize(
    ("text", "detail"),
    [("{", ""), ("[]", ""), ('{"message": 3}', "3"), ("[" * 100_000, ""), ("x" * (2 << 20), "")],
)
def test_error_file_in_another_format(tmp_path: Path, text: str, detail: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert causes.elastic_error(str(tmp_path / "error.json")) == detail
