"""The agent's compiled modules beside its .pyz: when they are used, and when its sources are."""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import source_hash
from pathlib import Path

import pytest
from support.agentnode import Node, agent_file

MODULE = "agent.version"
MARKED = "import sys\nsys.stderr.write('compiled\\n')\ndef conflict(step): raise SystemExit('stop')\n"


@pytest.fixture
def installed(node: Node) -> Node:
    """A node whose agent has been compiled, with a module that reports that it runs."""
    folder = node.home / "agent"
    folder.mkdir()
    node.agent = Path(shutil.copy(agent_file(), folder / "agent.pyz"))
    assert node.send("compile", b"").returncode == 0
    codes, methods = read(compiled(node))
    write(compiled(node), ({**codes, MODULE: (False, marshal.dumps(compile(MARKED, "", "exec")))}, methods))
    return node


def compiled(node: Node) -> Path:
    (path,) = (path for path in node.agent.parent.iterdir() if path != node.agent)
    return path


Content = tuple[dict[str, tuple[bool, bytes]], dict[bytes, bytes]]  # modules, methods of dataclasses


def read(path: Path) -> Content:
    found: Content = marshal.loads(path.read_bytes()[8:])  # noqa: S302
    return found


def write(path: Path, content: Content) -> None:
    data = marshal.dumps(content)
    path.write_bytes(source_hash(data) + data)


def uses_it(node: Node) -> bool:
    done = node.send("jobs", b"{}\n")
    assert done.returncode == (1 if b"stop" in done.stderr else 0), done.stderr
    return done.stderr.startswith(b"compiled\n")


def test_compiled_modules_are_used(installed: Node) -> None:
    assert uses_it(installed)
    codes, _ = read(compiled(installed))
    assert {"agent", "agent.supervisor", "agent.rank", "cloudddp.agent.protocol.codec"} <= codes.keys()
    assert codes["agent"][0]
    assert not codes["agent.rank"][0]


@pytest.mark.parametrize("words", [("jobs", "{}"), ("serve",)])
def test_no_method_of_a_dataclass_is_compiled_when_the_agent_starts(
    installed: Node, words: tuple[str, ...]
) -> None:
    assert installed.send("compile", b"").returncode == 0
    assert compilations(installed, *words) == 0


def test_methods_that_are_missing_in_the_file_are_compiled(installed: Node) -> None:
    assert installed.send("compile", b"").returncode == 0
    path = compiled(installed)
    codes, methods = read(path)
    write(path, (codes, dict(list(methods.items())[::2])))
    assert compilations(installed, "jobs", "{}") > 0


def compilations(node: Node, *words: str) -> int:
    """Return how many methods of dataclasses the agent compiles for this command."""
    program = (
        "import os, runpy, sys\n"
        "def hook(event, given):\n"
        "    if event == 'compile' and '__create_fn' in str(given[0]): os.write(2, b'!')\n"
        "sys.addaudithook(hook)\n"
        f"sys.argv = {[str(node.agent), *words]!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"  # ends this process
    )
    done = subprocess.run(
        [sys.executable, "-IS", "-X", "utf8", "-c", program],
        env={"HOME": str(node.home)}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stderr.count("!")


def test_methods_of_dataclasses_are_taken_from_the_file(installed: Node) -> None:
    assert installed.send("compile", b"").returncode == 0
    path = compiled(installed)
    codes, methods = read(path)
    assert len(methods) > 100
    write(path, (codes, dict.fromkeys(methods, b"")))  # no code: it fails where a method is used
    done = installed.send("jobs", b"{}\n")
    assert b"EOFError" in done.stderr


def test_agent_that_is_compiled_again_is_whole(installed: Node) -> None:
    assert installed.send("compile", b"").returncode == 0
    assert not uses_it(installed)
    assert installed.jobs() == ()
    assert compiled(installed).stat().st_mode & 0o777 == 0o600


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def writable_by_others(path: Path) -> None:
    path.chmod(0o622)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_another_version(path: Path) -> None:
    path.rename(path.with_name(path.name.replace(f"-{sys.hexversion:x}", "-3080000")))


def of_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "change",
    [
        truncated,
        empty,
        damaged,
        writable_by_others,
        a_link,
        a_folder,
        a_pipe,
        of_another_version,
        of_another_user,
    ],
)
def test_sources_are_used_instead_of_a_file_that_may_not_be_trusted(
    installed: Node, change: Callable[[Path], None]
) -> None:
    change(compiled(installed))
    assert not uses_it(installed)


def test_failed_compilation_leaves_nothing(node: Node) -> None:
    folder = node.home / "agent"
    folder.mkdir()
    node.agent = Path(shutil.copy(agent_file(), folder / "agent.pyz"))
    limited = ["prlimit", "--fsize=4096", sys.executable, "-IS", str(node.agent), "compile"]
    assert subprocess.run(limited, capture_output=True, check=False).returncode
    assert list(folder.iterdir()) == [node.agent]
    assert node.jobs() == ()


@pytest.mark.parametrize("words", [("jobs", "{}"), ("serve",)])
def test_a_step_imports_little_of_the_standard_library(installed: Node, words: tuple[str, ...]) -> None:
    """Each module takes milliseconds, for which the first step waits."""
    assert installed.send("compile", b"").returncode == 0
    done = subprocess.run(
        [sys.executable, "-IS", "-X", "utf8", "-X", "importtime", installed.agent, *words],
        stdin=subprocess.DEVNULL,
        env={"HOME": str(installed.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"dataclasses", "agent.phases" if words[0] == "jobs" else "agent.steps"} <= found
    assert not found & {"inspect", "ast", "dis", "subprocess", "hashlib", "threading", "tempfile", "logging"}


def test_compilation_has_the_lowest_priority(node: Node, tmp_path: Path) -> None:
    trace = tmp_path / "nice"
    program = f"import os, runpy, sys; sys.argv = [{str(node.agent)!r}, 'compile']\n" + (
        "def hook(event, given):\n"
        f"    if event == 'os.rename': open({str(trace)!r}, 'w').write(f'{{os.nice(0)}} {{os.getsid(0) == os.getpid()}}')\n"
        "sys.addaudithook(hook)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    subprocess.run(
        [sys.executable, "-IS", "-X", "utf8", "-c", program], env={"HOME": str(node.home)}, check=True
    )
    assert trace.read_text() == "19 True"


def test_closed_output_does_not_change_the_exit_code(node: Node) -> None:
    command = f"exec {sys.executable} -IS -X utf8 {node.agent} compile"
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], env={"HOME": str(node.home)}, check=False)
        assert done.returncode == 0, closed
