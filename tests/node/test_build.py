"""The agent's archive: the same sources give the same bytes, and it runs without anything but the standard
library."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from support.agentnode import Node

from cloudddp.agent import program
from cloudddp.agent.protocol import ExitCode
from cloudddp.files import payload_root

PROGRAM = payload_root() / "infra" / "node" / "agent"
PROTOCOL = Path(program.__file__).parent / "protocol"


def test_agent_is_the_same_wherever_and_whenever_it_is_built(tmp_path: Path) -> None:
    for number, (mode, mtime) in enumerate([(0o600, 10**9), (0o755, 1_700_000_000)]):
        copy = tmp_path / f"copy {number}"
        shutil.copytree(PROGRAM, copy / "agent", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(PROTOCOL, copy / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
        for path in sorted(copy.rglob("*.py"), reverse=bool(number)):
            path.chmod(mode)
            os.utime(path, (mtime, mtime))
        (copy / "agent" / "__pycache__").mkdir()
        (copy / "agent" / "__pycache__" / "x.pyc").touch()
        (copy / "agent" / "notes.txt").touch()
        assert program.read_sources(copy / "agent", copy / "protocol") == program.sources()


def test_agent_is_the_same_in_another_process() -> None:
    code = "import sys; from cloudddp.agent import program; sys.stdout.write(program.agent_path())"
    env = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    out = subprocess.check_output([sys.executable, "-c", code], env=env, umask=0o077, text=True)
    assert out == program.agent_path()


def test_agent_holds_its_modules_and_the_protocol_only() -> None:
    with zipfile.ZipFile(io.BytesIO(program.archive())) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    some = "__main__.py agent/__main__.py agent/ranks/rank.py cloudddp/agent/protocol/codec.py"
    assert set(some.split()) <= set(names)
    folders = {Path(name).parent for name in names}
    packages = {path.relative_to(PROGRAM.parent).parent for path in PROGRAM.rglob("__init__.py")}
    assert folders == {*packages, *map(Path, (".", "cloudddp", "cloudddp/agent", "cloudddp/agent/protocol"))}


def test_every_module_of_the_agent_imports_without_site_packages(node: Node) -> None:
    code = (
        "import importlib, pathlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "found = [path.relative_to(sys.argv[1]) for path in pathlib.Path(sys.argv[1]).rglob('*.py')]\n"
        "names = [str(path)[:-3] for path in found if len(path.parts) > 1]\n"
        "modules = [importlib.import_module(name.replace('/', '.')) for name in names]\n"
        "assert all(module.__file__.startswith(sys.argv[1]) for module in modules)\n"
        "print(len(modules))\n"
    )
    words = [sys.executable, "-IS", "-c", code, str(node.agent)]
    assert int(subprocess.check_output(words, text=True)) > 20


def test_request_that_does_not_fit_is_refused(node: Node) -> None:
    for step, data, why in (
        ("../store", b"{}\n", b"not a step"),
        ("probe", b"", b"bad request: "),
        ("probe", b'{"project": "../x"}\n', b"bad request: "),
    ):
        done = node.send(step, data)
        assert (done.returncode, why in done.stderr) == (1, True)
        assert not node.store.exists()


# -- shipping: several at once, an agent that is damaged, a full disk ----------------------------------------


STEP = program.step_command("jobs")


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
    home, agent = tmp_path / "a home", program.compressed_agent()
    home.mkdir()
    processes = [start(home, f"{program.ship()} && echo {{}} | ({STEP})") for _ in range(6)]
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
    assert files(home) == [Path(program.agent_path()).name]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "module removed": lambda agent: (agent / "agent" / "node" / "commands.py").unlink(),
    "module changed": lambda agent: (agent / "__main__.py").write_bytes(b"print('owned')\n"),
    "module added": lambda agent: (agent / "json.py").write_bytes(b"print('owned')\n"),
}


def test_damaged_agent_is_not_run_and_is_shipped_again(tmp_path: Path) -> None:
    agent = tmp_path / program.agent_path()
    for damage in DAMAGE.values():
        assert run(tmp_path, program.ship(), program.compressed_agent()) == (0, "")
        damage(agent)
        assert step(tmp_path)[0] == ExitCode.NO_AGENT.value
    assert run(tmp_path, program.ship(), program.compressed_agent()) == (0, "")
    assert step(tmp_path) == (0, "")
    assert files(tmp_path) == [agent.name]


def test_agent_that_arrives_in_part_is_not_put_in_place(tmp_path: Path) -> None:
    code, _ = run(tmp_path, program.ship(), program.compressed_agent()[:-1000])
    assert code != 0
    assert list((tmp_path / ".cloudddp").iterdir()) == [], "each attempt would leave more on a disk"
    assert step(tmp_path)[0] == ExitCode.NO_AGENT.value
    assert run(tmp_path, program.ship(), program.compressed_agent()) == (0, "")
