"""Which file a launch starts: modules are looked up on the laptop as paths are, by Python's own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudddp import scripts
from cloudddp.errors import UsageError
from cloudddp.ranks import Script


def located(root: Path, target: str, *, here: str = "", ignored: tuple[str, ...] = (), **env: str) -> Script:
    sent = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    kept = [name for name in sent if name not in ignored]
    return scripts.located(root, root / here, Script(target, ("x",), module=True), kept, env)


def made(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("print('ran')\n")
    return root


def python_runs(root: Path, target: str, **env: str) -> bool:
    """What Python itself makes of it in that folder, without what is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", target], cwd=root, env=env, capture_output=True, check=False
    )
    return done.returncode == 0 and done.stdout.endswith(b"ran\n")


@pytest.mark.parametrize(
    ("files", "target"),
    [
        (("train.py",), "train"),
        (("train/main.py",), "train.main"),
        (("pkg/__init__.py", "pkg/__main__.py"), "pkg"),
        (("folder/__main__.py",), "folder"),
        (("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/go.py"), "pkg.sub.go"),
        (("both.py", "both/inner.py"), "both"),
        (("my-script.py",), "my-script"),
        (("train/py.py",), "train.py"),
    ],
)
def test_a_module_is_found_where_python_finds_it(tmp_path: Path, files: tuple[str, ...], target: str) -> None:
    made(tmp_path, *files)
    assert python_runs(tmp_path, target)
    assert located(tmp_path, target) == Script(target, ("x",), module=True)


@pytest.mark.parametrize(
    ("files", "target", "said", "hint"),
    [
        (("train.py",), "train.py", "no module 'train.py'", "`-m train`, or train.py without -m"),
        (
            ("sub/train.py",),
            "sub/train.py",
            "no module 'sub/train.py'",
            "`-m sub.train`, or sub/train.py without",
        ),
        (("train/main.py",), "train.mian", "no module 'train.mian'", "`-m train.main`"),
        (("train/main.py",), "nosuch.main", "no module 'nosuch.main'", "modules of the project: train.main"),
        (("train/main.py",), "torch.distributed.run", "no module '", "leave out -m torch.distributed.run"),
        (("train/main.py", "a.py"), "pytest", "no module 'pytest'", "runpy.run_module('pytest'"),
        (("pkg/__init__.py", "pkg/go.py"), "pkg", "package without __main__.py", "its modules: pkg.go"),
        (("data/go.py",), "data", "package without __main__.py", "its modules: data.go"),
        (("pkg.py", "pkg/__init__.py", "pkg/go.py"), "pkg", "package without __main__.py", "pkg.go"),
        (
            ("train.py", "train/main.py"),
            "train.main",
            "train.py hides the folder train/",
            "train/__init__.py",
        ),
        (("src/pkg/go.py",), "pkg.go", "no module 'pkg.go'", 'PYTHONPATH = "src"'),
        (("a.py",), ".a", "no module '.a'", "did you mean `-m a`?"),
        (("a.py",), "", "no module ''", "modules of the project: a"),
    ],
)
def test_a_module_that_python_would_not_find_is_refused_with_what_to_type(
    tmp_path: Path, files: tuple[str, ...], target: str, said: str, hint: str
) -> None:
    made(tmp_path, *files)
    if target not in ("pytest", "torch.distributed.run"):
        assert not python_runs(tmp_path, target)
    with pytest.raises(UsageError) as refused:
        located(tmp_path, target)
    assert said in refused.value.message
    assert hint in refused.value.hint


def test_modules_below_a_folder_of_the_ranks_pythonpath_are_found(tmp_path: Path) -> None:
    made(tmp_path, "src/pkg/go.py")
    assert python_runs(tmp_path, "pkg.go", PYTHONPATH="src")
    assert located(tmp_path, "pkg.go", PYTHONPATH="/elsewhere:./src/").target == "pkg.go"


def test_in_a_subfolder_the_name_from_the_root_is_offered(tmp_path: Path) -> None:
    made(tmp_path, "sub/deep/go.py")
    with pytest.raises(UsageError) as refused:
        located(tmp_path, "go", here="sub/deep")
    assert "`-m sub.deep.go`" in refused.value.hint


@pytest.mark.parametrize("ignored", ["train/main.py", "pkg/__main__.py"])
def test_a_module_that_the_nodes_would_not_get_is_refused(tmp_path: Path, ignored: str) -> None:
    made(tmp_path, "train/main.py", "pkg/__main__.py", "other.py")
    target = ignored.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    with pytest.raises(UsageError, match="ignored by git"):
        located(tmp_path, target, ignored=(ignored,))


@pytest.mark.parametrize("words", [("launch", "-m", "train.py"), ("run", "-m", "nosuch.main")])
def test_a_module_that_does_not_exist_is_a_usage_error_before_any_call(
    cli: Any, faults: Any, words: tuple[str, ...]
) -> None:
    cli.write("train.py", "")
    done = cli(*words)
    assert done.returncode == 2
    assert f"there is no module {words[2]!r}" in done.stderr
    assert faults.calls == []
