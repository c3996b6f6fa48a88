"""Which file a launch starts: scripts by path, modules by Python's own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import CommandLine

from cloudddp.errors import UsageError
from cloudddp.job.job_request import find_script, localhost_line
from cloudddp.job.ranks import Script


def found(root: Path, here: Path, script: Script, **env: str) -> Script:
    sent = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    return find_script(root, here, script, sent, env)[0]


def resolve(root: Path, target: str, *, here: str = "", **env: str) -> Script:
    return found(root, root / here, Script(target, ("x",), module=True), **env)


def write_files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("print('ran')\n")
    return root


def python_runs(root: Path, target: str, **env: str) -> bool:
    """Whether Python itself finds the module in that folder, without installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", target], cwd=root, env=env, capture_output=True, check=False
    )
    return done.returncode == 0 and done.stdout.endswith(b"ran\n")


@pytest.mark.parametrize(
    ("files", "target"),
    [
        (("train/main.py",), "train.main"),
        (("pkg/__init__.py", "pkg/__main__.py"), "pkg"),
        (("folder/__main__.py",), "folder"),
        (("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/go.py"), "pkg.sub.go"),
        (("both.py", "both/inner.py"), "both"),
    ],
)
def test_module_is_found_where_python_finds_it(tmp_path: Path, files: tuple[str, ...], target: str) -> None:
    write_files(tmp_path, *files)
    assert python_runs(tmp_path, target)
    assert resolve(tmp_path, target) == Script(target, ("x",), module=True)


@pytest.mark.parametrize(
    ("files", "target", "message", "hint"),
    [
        (("train.py",), "train.py", "no module 'train.py'", "`-m train`, or train.py without -m"),
        (("train/main.py",), "train.mian", "no module 'train.mian'", "`-m train.main`"),
        (("train/main.py",), "nosuch.main", "no module 'nosuch.main'", "modules of the project: train.main"),
        (("train/main.py",), "torch.distributed.run", "no module '", "omit -m torch.distributed.run"),
        (("pkg/__init__.py", "pkg/go.py"), "pkg", "package without __main__.py", "its modules: pkg.go"),
        (
            ("train.py", "train/main.py"),
            "train.main",
            "train.py hides the folder train/",
            "train/__init__.py",
        ),
        (("src/pkg/go.py",), "pkg.go", "no module 'pkg.go'", 'PYTHONPATH = "src"'),
        (("here/deep/go.py",), "go", "no module 'go'", "`-m here.deep.go`"),  # its name in this folder
        (("a.py",), ".a", "no module '.a'", "did you mean `-m a`?"),
    ],
)
def test_unknown_module_is_refused_with_a_suggestion(
    tmp_path: Path, files: tuple[str, ...], target: str, message: str, hint: str
) -> None:
    write_files(tmp_path, *files)
    if target not in ("pytest", "torch.distributed.run"):
        assert not python_runs(tmp_path, target)
    with pytest.raises(UsageError) as refused:
        resolve(tmp_path, target, here="here/deep")
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_module_is_found_through_pythonpath_and_that_of_this_computer_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, "src/pkg/go.py")
    assert python_runs(tmp_path, "pkg.go", PYTHONPATH="src")
    assert resolve(tmp_path, "pkg.go", PYTHONPATH="/elsewhere:./src/").target == "pkg.go"
    with pytest.raises(UsageError, match="a path of this computer") as caught:
        resolve(tmp_path, "pkg.go", PYTHONPATH=f"/opt/x:{tmp_path}/src")
    assert caught.value.hint == "write it as src"


def test_unknown_module_is_refused_before_any_call(line: CommandLine) -> None:
    """Without credentials: a call would be another error."""
    line.write("train.py", "")
    for words in (("launch", "-m", "train.py"), ("run", "-m", "nosuch.main")):
        assert f"no module {words[2]!r}" in line.fails(2, *words, "x")


# -- programs that are not Python files ----------------------------------------------------------------------


def by_path(root: Path, target: str, *args: str) -> Script:
    return found(root, root, Script(target, args))


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("train.sh", "exec python t.py", ("bash", "train.sh")),
        ("sub/train.bash", "", ("bash", "sub/train.bash")),
        ("train", "#!/usr/bin/env ruby\n", ("./train",)),
        ("sub/train", "\x7fELF", ("./sub/train",)),
        ("train.py", "#!/bin/sh\n", ()),
        ("tool", "#!/usr/bin/env python3\n", ()),
        ("no_suffix", "print(1)", ()),
    ],
)
def test_program_is_started_by_what_it_needs(
    tmp_path: Path, name: str, text: str, program: tuple[str, ...]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
    script = by_path(tmp_path, name, "--lr", "1")
    assert script == Script(name, ("--lr", "1"), program=program)
    assert script.shown == f"{name} --lr 1"
    if program:
        assert script.argv[2:] == [*program, "--lr", "1"]


def test_console_entry_point_of_the_project_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\nmy-train = "a:main"\n')
    assert by_path(tmp_path, "my-train", "x") == Script("my-train", ("x",), program=("my-train",))


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("nb.ipynb",), "is a notebook", "jupyter nbconvert --to script nb.ipynb"),
        (
            "accelerate launch --nprocs 2 t.py --x".split(),
            "without `accelerate launch",
            "cloudddp launch t.py --x`",
        ),
        (("deepspeed", "t.py"), "without `deepspeed`", "cloudddp launch t.py`"),
        (("uv", "run", "t.py"), "without `uv run`", "[setup] run"),
        (("plain",), "not executable", "chmod +x plain"),
        (("my-train",), "script not found", 'exec my-train "$@"'),
        (("palin",), "script not found: palin", "did you mean plain?"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_command_that_works(
    tmp_path: Path, words: tuple[str, ...], message: str, hint: str
) -> None:
    for name, text in (("nb.ipynb", "{}"), ("t.py", ""), ("plain", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as refused:
        by_path(tmp_path, *words)
    assert message in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("line", "is_set"),
    [
        ('os.environ["MASTER_ADDR"] = "localhost"', True),
        ("    os.environ['MASTER_ADDR']='127.0.0.1'  # the spawned ranks", True),
        ("dist.init_process_group('gloo', init_method='tcp://127.0.0.1:23456', rank=rank)", True),
        ('os.environ.setdefault("MASTER_ADDR", "localhost")', False),
        ('# os.environ["MASTER_ADDR"] = "localhost"', False),
        ('os.environ["MASTER_ADDR"] = args.master', False),
    ],
)
def test_script_that_sets_the_rendezvous_address_to_localhost(
    tmp_path: Path, line: str, is_set: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{line}\n")
    assert localhost_line(script) == (2 if is_set else 0)
