"""What the agent tells root's timer about the end of the node, and what it reads of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.agentnode import Node, Refused, until

from agent.jobs import poweroff
from cloudddp.agent.protocol.machine import CLIENT_SECONDS, PowerOffReply, PowerOffRequest

FOREVER = "import time; time.sleep(600)"


def plan(node: Node) -> dict[str, object] | None:
    path = node.store / "poweroff.json"
    found: dict[str, object] | None = json.loads(path.read_text()) if path.exists() else None
    return found and {key: value for key, value in found.items() if key != "written"}


def test_plan_is_that_of_the_last_job(node: Node) -> None:
    first, second = (f"20260101-000000-000{number}" for number in range(2))
    assert node.call(PowerOffRequest(first, 60.0, 9000.0)) == PowerOffReply(first)
    assert plan(node) == {"job": first, "seconds": 60.0, "clients": 9000.0}
    node.start(FOREVER, poweroff=30.0)
    until(lambda: plan(node) == {"job": node.id(), "seconds": 30.0, "clients": CLIENT_SECONDS})
    assert node.call(PowerOffRequest(second, 60.0)) == PowerOffReply(node.id())  # another one runs
    node.cancel()
    node.start("", job="job-2")
    until(lambda: plan(node) is None)


def test_plan_that_cannot_be_written(node: Node) -> None:
    """A rank may put anything in its place; a disk may be read-only."""
    (node.store / "poweroff.json").mkdir(parents=True)
    with pytest.raises(Refused, match=r"^/.*/poweroff\.json: Is a directory"):
        node.call(PowerOffRequest("20260101-000000-0000", 60.0))
    assert node.start("", poweroff=30.0)


@pytest.mark.parametrize(
    ("file", "ended", "unused"),
    [
        (100.0, 5.0, 100),
        (-100.0, 5.0, 0),
        (None, 50.0, 50),  # another version has installed the timer
        (None, -86_400.0, 0),  # the clock was set back
        (None, None, 0),  # no end was recorded
    ],
)
def test_time_without_a_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: float | None, ended: float | None, unused: int
) -> None:
    """Given are seconds before now."""
    monkeypatch.setattr(poweroff, "UNUSED", tmp_path / "unused")
    if file is not None:
        (tmp_path / "unused").write_text(f"{time.clock_gettime(time.CLOCK_BOOTTIME) - file} 1 1 1\n")
    assert round(poweroff.unused(None if ended is None else time.time() - ended)) == unused


@pytest.mark.parametrize("is_ending", [True, False])
def test_job_does_not_start_into_a_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    """The process has its name before it looks: the timer sets its mark before it looks for that name."""
    monkeypatch.setattr(poweroff, "ENDING", tmp_path / "mark")
    if is_ending:
        poweroff.ENDING.touch()
    pid = os.fork()  # which gets the name
    if pid == 0:
        code = 1
        try:
            poweroff.occupy()
            code = 2
        except SystemExit:
            code = 3 if Path("/proc/self/comm").read_text() == "cloudddp-job\n" else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (3 if is_ending else 2)
