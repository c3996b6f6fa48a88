"""Ranks whose agent (guard and supervisor) was killed: their wrappers, which are all that is left of
cloudddp, end them."""

from __future__ import annotations

import os
import signal
import sys

from support.agentnode import FOREVER, SAVES, STUBBORN, Node, alive, first_of, gone, processes_of, until
from support.gangs import Make, Processes, freeze, kill

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


def test_rank_goes_on_if_the_record_of_the_agent_is_damaged(node: Node) -> None:
    """A rank may write any file of its user."""
    code = (
        "import os, time\n"
        f"path = os.path.expanduser('~/.cloudddp/jobs/{node.id()}/state.json')\n"
        f"open(path + '.x', 'w').write('{{'); os.replace(path + '.x', path)\n"
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
