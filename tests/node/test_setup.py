"""Set-up commands on a node: once for each content, listed and cancelled as a part of their job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import HANG_GUARD, Node, alive, processes_of, until
from support.programs import program

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process, SetupReply
from cloudddp.agent.replies import decode

WAIT_FOR_GATE = "while [ ! -e go ]; do sleep 0.05; done"


def test_set_up_runs_once_for_the_same_content(node: Node) -> None:
    def log_of(*commands: str, content: str) -> str:
        (node.project / "requirements.txt").write_text(content)
        for _ in range(2):
            reply = node.set_up(*commands, inputs=("requirements.txt",), env={"MINE": "x y"})
            assert reply == SetupReply(exit_code=0)
        return (node.project / "log").read_text()

    commands = ("echo run >> log", 'echo "$MINE" >> log')
    assert log_of(*commands, content="a") == "run\nx y\n"
    assert log_of(*commands, content="b") == "run\nx y\n" * 2
    # A run for another content has replaced what this one did.
    assert log_of(*commands, content="a") == "run\nx y\n" * 3
    assert log_of("echo other >> log", content="a") == "run\nx y\n" * 3 + "other\n"
    assert node.set_up("exit 3").exit_code == 3
    assert log_of("echo other >> log", content="a") == "run\nx y\n" * 3 + "other\n" * 2
    for a, b in (("xy", "z"), ("x", "yz")):  # content that moves between inputs is a change
        (node.project / "a").write_text(a)
        (node.project / "b").write_text(b)
        assert node.set_up("echo moved >> log2", inputs=("a", "b")).exit_code == 0
    assert (node.project / "log2").read_text() == "moved\nmoved\n"


def test_failed_command_stops_the_set_up_and_is_repeated(node: Node) -> None:
    failing = "echo out; echo err >&2; exit 3"
    for _ in range(2):
        reply = node.set_up("echo fine", failing, "touch never")
        assert reply == SetupReply(exit_code=3, command=failing, output="out\nerr\n")
    assert not (node.project / "never").exists()


def running(node: Node, command: str, **more: Any) -> subprocess.Popen[bytes]:
    """Return the process of a set-up whose command has started."""
    process = node.begin(node.setting_up(f"touch began; {command}", **more))
    until(lambda: (node.project / "began").exists())
    return process


def test_cancel_ends_every_process_of_a_set_up(node: Node) -> None:
    """One ignores SIGTERM, and another one is a daemon without an environment."""
    process = running(node, "setsid env -i sleep 601 & trap '' TERM; while :; do sleep 0.1; done")
    assert node.cancel(grace=0.5).left == 0
    assert set(processes_of(node.home)) <= {process.pid}  # the step itself, which replies now
    assert process.stdout is not None
    assert decode(process.stdout.read().rstrip(), SetupReply).cancelled
    assert process.wait(HANG_GUARD) == 0
    assert node.set_up("touch ran", job="job-2").exit_code == 0
    assert (node.project / "ran").exists()


def test_set_up_is_listed_as_a_job_until_it_ends(node: Node) -> None:
    process = running(node, WAIT_FOR_GATE)
    state = node.state()
    assert (state.phase, state.script, state.node) == (JobPhase.SETUP, "script.py", 0)
    assert node.probe().running == (node.id(),)
    (node.project / "go").touch()
    assert process.wait(HANG_GUARD) == 0
    assert node.jobs() == ()


def test_cancel_between_two_commands_stops_the_set_up(node: Node) -> None:
    folder = node.folder()
    folder.mkdir(parents=True)
    (folder / "cancel").touch()
    assert node.set_up("touch never").cancelled
    assert not (node.project / "never").exists()


def test_set_up_waits_for_that_of_another_launch(node: Node) -> None:
    first = running(node, f"{WAIT_FOR_GATE}; echo 1 >> order")
    second = node.begin(node.setting_up("echo 2 >> order", job="job-2"))
    (node.project / "go").touch()
    assert (first.wait(HANG_GUARD), second.wait(HANG_GUARD)) == (0, 0)
    assert (node.project / "order").read_text() == "1\n2\n"


def test_background_process_of_a_set_up_outlives_the_job(node: Node) -> None:
    """A service that it starts serves the next jobs, too: the set-up runs only once."""
    assert node.set_up("sleep 600 & echo $! > pid").exit_code == 0
    pid = int((node.project / "pid").read_text())
    node.start("print('ran')")
    assert node.follow().state.phase is JobPhase.SUCCEEDED
    assert node.cancel().left == 0
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


# -- the environment of Python -------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that is not on PATH, with a program of its own, as /opt/pytorch is on the
    DLAMI."""
    folder = tmp_path / "environment"
    program(folder / "bin/torchrun-of-image", "echo torchrun of the image")
    (folder / "lib/python3.11/site-packages").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    (folder / "bin/python").symlink_to(sys.executable)
    return folder


def test_set_up_runs_in_the_environment_of_the_ranks_python(node: Node, environment: Path) -> None:
    """Otherwise `pip` is the system's, which refuses to install (PEP 668), or installs where ranks do not
    look."""
    show = 'echo "$VIRTUAL_ENV"; command -v python; torchrun-of-image; exit 3'
    reply = node.set_up(show, python=str(environment / "bin/python"))
    assert reply.output == f"{environment}\n{environment}/bin/python\ntorchrun of the image\n"
    reply = node.set_up('echo "$PATH"; exit 3', python=str(environment / "bin/python"), env={"PATH": "/bin"})
    assert reply.output == "/bin\n", "variables of the user win"
    reply = node.set_up('echo "$PATH"; exit 3', python=shutil.which("python3"))
    assert reply.output == f"{os.environ['PATH']}\n", "it is the first one on PATH already"


def test_command_uses_the_environment_that_an_earlier_one_created(node: Node) -> None:
    folder, python = ".venv", ".venv/bin/python"
    create = f"mkdir -p {folder}/bin && ln -s {sys.executable} {python} && touch {folder}/pyvenv.cfg"
    reply = node.set_up(create, 'command -v python; echo "$VIRTUAL_ENV"; exit 3', python=python)
    first, second = reply.output.splitlines()
    assert first.endswith(f"{folder}/bin/python")
    assert second.endswith(folder)


def test_ranks_run_in_the_environment_of_their_python(node: Node, environment: Path) -> None:
    code = "import os; print(os.environ['VIRTUAL_ENV'], flush=True); os.system('torchrun-of-image')"
    argv = (str(environment / "bin/python"), node.script(code))
    node.start(processes=(Process((), argv, {"RANK": "0"}),))
    assert node.follow().logs[0].decode() == f"{environment}\ntorchrun of the image\n"


def test_environment_that_may_not_be_changed_is_named(node: Node, environment: Path) -> None:
    """pip in a virtual environment of another user: [Errno 13] Permission denied."""
    packages = environment / "lib/python3.11/site-packages"
    packages.rmdir()
    packages.symlink_to("/proc/sys")  # which nobody may write to
    for text, read_only in (("Permission denied", str(environment)), ("no such package", "")):
        reply = node.set_up(f"echo '{text}'; exit 1", python=str(environment / "bin/python"))
        assert reply.read_only == read_only


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_set_up_keeps_its_node_until_the_connection_is_gone(node: Node) -> None:
    """The timer that powers a node off (infra/node/cloudddp-idle.sh) goes by the name of the process."""
    process = running(node, "sleep 600")
    assert comm(process.pid) == "cloudddp-job"
    assert process.stderr is not None
    process.stderr.close()
    until(lambda: comm(process.pid) == "cloudddp-setup")
    assert node.state().phase is JobPhase.SETUP
    assert node.cancel(grace=0.5).left == 0
    assert process.wait(HANG_GUARD) == 0


def test_output_with_a_byte_that_ends_a_step_is_passed_on(node: Node) -> None:
    done = node.run(node.setting_up("printf 'before x\\000y after\\n'"))
    assert done.returncode == 0
    assert b"before xy after" in done.stderr
    assert b"\0" not in done.stderr
