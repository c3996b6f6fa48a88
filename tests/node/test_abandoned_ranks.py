"""Ranks whose agent (guard and supervisor) was killed: their wrappers, which are all that is left of
cloudddp, end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.agentnode import (
    FOREVER,
    HANG_GUARD,
    SAVES,
    STUBBORN,
    WAITING,
    Node,
    alive,
    first_of,
    gone,
    processes_of,
    until,
)
from support.gangs import Make, Processes, freeze, kill, thaw

from agent.node import kernel
from cloudddp.agent.protocol import SUPERVISOR_VARIABLE
from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process


def wait_for_ranks(node: Node, *ranks: int) -> None:
    """Wait until these ranks are ready."""
    logs = [node.folder() / "ranks" / f"{rank}.log" for rank in ranks]
    until(lambda: all(log.exists() and b"ready" in log.read_bytes() for log in logs))


def test_ranks_may_save_within_the_grace_and_end_with_their_children(node: Node) -> None:
    """Of a shell script that runs Python, only the shell gets the signal of its wrapper: it ends before its
    child, or waits for it."""
    inner = f"{sys.executable} {node.script(STUBBORN)}; exit 0"
    commands = [
        (sys.executable, node.script(STUBBORN)),
        (sys.executable, node.script(SAVES)),
        ("sh", "-c", inner),
        ("sh", "-c", f"trap '' TERM; {inner}"),
    ]
    node.start(processes=[Process((), argv, {"RANK": str(k)}) for k, argv in enumerate(commands)], grace=5.0)
    wait_for_ranks(node, 0, 1, 2, 3)
    found = Processes(node)
    kill(found.guard, found.supervisor)
    gone(node.home)
    state = node.state()
    assert state.phase is JobPhase.LOST
    assert (state.ranks[0].signal, state.ranks[1].exit_code) == (signal.SIGKILL, 143)
    assert (node.project / "saved").exists()


def test_agent_that_is_about_to_end_does_not_keep_what_a_rank_leaves_behind(node: Node) -> None:
    """A process that was killed is still listed until it runs again, and the rank may have ended before.
    Here, another process stands for such a guard."""
    node.start(processes=[Process((), ("sh", "-c", f"{sys.executable} {node.script(STUBBORN)}; exit 0"), {})])
    wait_for_ranks(node, 0)
    found = Processes(node)
    freeze(found.guard, found.supervisor)
    with subprocess.Popen(["sleep", "0.7"]) as guard:
        path = node.folder() / "state.json"
        state = {**json.loads(path.read_bytes()), "guard": guard.pid, "guard_born": kernel.born(guard.pid)}
        path.write_text(json.dumps(state))
        kill(found.guard, found.supervisor)
        gone(node.home)


def test_rank_ends_although_its_launcher_does_not(node: Node) -> None:
    """The launcher ignores SIGTERM, so nobody signals the wrapper: it has to notice by itself."""
    ignoring = ("sh", "-c", "trap '' TERM; \"$@\"; exec sleep 1000", "sh")
    rank = (sys.executable, node.script(STUBBORN))
    node.start(processes=[Process(ignoring, rank, {"RANK": "0"})], grace=0.5)
    wait_for_ranks(node, 0)
    found = Processes(node)
    kill(found.guard, found.supervisor)
    until(lambda: not any(map(alive, [*found.ranks, *found.wrappers])))
    kill(*found.launchers, *(pid for pid in processes_of(node.home) if pid not in found.launchers))


def test_rank_whose_launcher_ended_while_its_wrapper_started_is_not_run(node: Node) -> None:
    """The wrapper cannot get a signal for the death of a parent that ended before: it looks whether the agent
    runs."""
    node.start(FOREVER)
    found = Processes(node)
    born = Path(f"/proc/{found.supervisor}/stat").read_text().rsplit(")", 1)[1].split()[19]
    node.variables[SUPERVISOR_VARIABLE] = f"{found.supervisor}:{born}"
    kill(found.guard, found.supervisor, *found.wrappers)
    gone(node.home)
    wrapper = node.popen("rank", node.id(), sys.executable, "-c", "open('ran', 'w')", cwd=node.project)
    wrapper.communicate(timeout=HANG_GUARD)
    assert wrapper.returncode != 0
    assert not (node.project / "ran").exists()


@pytest.mark.parametrize("text", ["{", '{"pid": 1}'])
def test_rank_goes_on_if_the_record_of_the_agent_is_damaged(node: Node, text: str) -> None:
    """A rank may write any file of its user."""
    code = (
        "import os, time\n"
        f"path = os.path.expanduser('~/.cloudddp/jobs/{node.id()}/state.json')\n"
        f"open(path + '.x', 'w').write({text!r}); os.replace(path + '.x', path)\n"
        "time.sleep(4)\nopen('finished', 'w').close()\n"
    )
    node.start(code, grace=0.0)
    until((node.project / "finished").exists)
    assert node.follow().ended


def test_frozen_agent_is_not_mistaken_for_a_dead_one(node: Node) -> None:
    node.start("import time\nprint('ready', flush=True)\ntime.sleep(4)", grace=0.0)
    found = Processes(node)
    os.kill(found.guard, signal.SIGSTOP)
    os.kill(found.supervisor, signal.SIGSTOP)
    until(lambda: [rank.exit_code for rank in node.state().ranks] == [0])
    os.kill(found.supervisor, signal.SIGCONT)
    os.kill(found.guard, signal.SIGCONT)
    assert node.follow().state.phase is JobPhase.SUCCEEDED


# -- the guard: it notices a supervisor that does nothing, although it lives ---------------------------------


SILENCE = 1.5  # seconds


def test_ranks_of_a_stopped_supervisor_end(gangs: Make) -> None:
    job = gangs(2, silence=SILENCE)
    job.start(FOREVER, STUBBORN)
    stopped = job.pids(1)
    freeze(stopped.supervisor)
    first, second = map(first_of, job.states())
    assert (first.cause, first.node) == (Cause.SILENT, 1)
    assert (second.cause, second.node) == (Cause.AGENT, 1)
    assert second.detail.startswith("it did nothing for ")
    job.gone()


def test_node_that_was_frozen_as_a_whole_goes_on(gangs: Make) -> None:
    job = gangs(1, silence=SILENCE)
    job.start(WAITING)
    found = job.pids(0)
    everything = (*found.of_cloudddp, *found.ranks)
    freeze(*everything)
    time.sleep(SILENCE + 5)  # longer than the guard waits
    thaw(*everything)
    time.sleep(1)
    assert alive(found.supervisor)
    (job[0].project / "go").touch()
    assert job.states()[0].phase is JobPhase.SUCCEEDED
