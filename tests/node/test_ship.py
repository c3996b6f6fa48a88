"""The command that ships the agent: several at once, an agent that is damaged, a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudddp.agent import steps
from cloudddp.agent.protocol import ExitCode

STEP = steps.step_command("jobs")


def start(home: Path, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", command],
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def run(home: Path, command: str, given: bytes = b"") -> tuple[int, str]:
    process = start(home, command)
    _, err = process.communicate(given)
    return process.returncode, err.decode()


def step(home: Path) -> tuple[int, str]:
    return run(home, STEP, b"{}\n")


def files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / ".cloudddp").glob("agent-*"))


def test_several_laptops_ship_at_once(tmp_path: Path) -> None:
    """Each then runs a step, which imports its modules while the others are still at it."""
    home, agent = tmp_path / "a home", steps.compressed_agent()
    home.mkdir()
    processes = [start(home, steps.ship(steps.agent_command("jobs", "{}"))) for _ in range(6)]
    for process in processes:  # all of them have found no agent
        assert process.stdin is not None
        process.stdin.write(agent[:1000])
        process.stdin.flush()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(agent[1000:])
        process.stdin.close()
    for process in processes:
        assert process.stderr is not None
        err = process.stderr.read().decode()
        assert process.wait() == 0, err
        process.stderr.close()
    assert files(home) == [Path(steps.agent_path()).name]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "module removed": lambda agent: (agent / "agent" / "node" / "commands.py").unlink(),
    "module emptied": lambda agent: (agent / "agent" / "__main__.py").write_bytes(b""),
    "module changed": lambda agent: (agent / "__main__.py").write_bytes(b"print('owned')\n"),
    "module added": lambda agent: (agent / "json.py").write_bytes(b"print('owned')\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_agent_is_not_run_and_is_shipped_again(tmp_path: Path, damage: str) -> None:
    agent = tmp_path / steps.agent_path()
    assert run(tmp_path, steps.ship("exit 0"), steps.compressed_agent()) == (0, "")
    assert step(tmp_path) == (0, "")
    DAMAGE[damage](agent)
    assert step(tmp_path)[0] == ExitCode.NO_AGENT.value
    assert run(tmp_path, steps.ship("exit 0"), steps.compressed_agent()) == (0, "")
    assert step(tmp_path) == (0, "")
    assert files(tmp_path) == [agent.name]


def test_agent_that_arrives_in_part_is_not_put_in_place(tmp_path: Path) -> None:
    code, _ = run(tmp_path, steps.ship("exit 0"), steps.compressed_agent()[:-1000])
    assert code != 0
    assert list((tmp_path / ".cloudddp").iterdir()) == [], "each attempt would leave more on a disk"
    assert step(tmp_path)[0] == ExitCode.NO_AGENT.value
    assert run(tmp_path, steps.ship("exit 0"), steps.compressed_agent()) == (0, "")
