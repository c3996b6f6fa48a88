"""The commands of [setup] environment; tests/cli runs them on nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudddp.config import settings
from cloudddp.config.environment import commands_of, derived
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config, SetupSpec
from cloudddp.errors import UsageError


def resolved(**setup: object) -> Config:
    return settings.resolve([Layer("file", {"setup": setup})])


@pytest.mark.parametrize(
    ("name", "inputs", "python"),
    [
        ("requirements.txt", ("requirements.txt",), ""),
        ("envs/gpu.txt", ("envs/gpu.txt",), ""),
        ("pyproject.toml", ("pyproject.toml",), ""),
        ("uv.lock", ("uv.lock", "pyproject.toml"), ".venv/bin/python"),
        ("sub/uv.lock", ("sub/uv.lock", "sub/pyproject.toml"), "sub/.venv/bin/python"),
        ("environment.yml", ("environment.yml",), ".conda/bin/python"),
    ],
)
def test_what_reruns_it_and_which_python_has_it(
    tmp_path: Path, name: str, inputs: tuple[str, ...], python: str
) -> None:
    """Before the user's own commands, which may use it."""
    config = derived(tmp_path, resolved(environment=name, run=["make ext"], inputs=["ext.c"]))
    assert config.setup.inputs == (*inputs, "ext.c")
    assert config.setup.run[-1] == "make ext"
    assert len(config.setup.run) > 1
    assert config.job.python == python


def test_python_of_the_settings_wins(tmp_path: Path) -> None:
    layers = [Layer("file", {"setup": {"environment": "uv.lock"}, "job": {"python": "python3.12"}})]
    assert derived(tmp_path, settings.resolve(layers)).job.python == "python3.12"


@pytest.mark.parametrize(
    ("lock", "sees_the_image"),
    [
        ('[[package]]\nname = "torch"\nversion = "2.12.0"\n', False),
        ('[[package]]\nname = "einops"\nversion = "0.8.1"\n', True),
        ("not a lock", True),
        ("package = 3", True),
    ],
)
def test_lock_without_torch_sees_the_one_of_the_image(lock: str, sees_the_image: bool) -> None:
    commands = commands_of(SetupSpec(environment="uv.lock"), lock=lock).commands
    assert ("--system-site-packages" in " ".join(commands)) == sees_the_image


@pytest.mark.parametrize("name", ["../x.txt", "/x.txt", "~/x.txt", "a/../x.txt", "x.lock", "train.py", ""])
def test_other_files_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"setup\.environment"):
        resolved(environment=name)


@pytest.mark.parametrize(
    "name", ["requirements.txt", "it's; touch x.txt", "-r.txt", "$(touch x).txt", "uv.lock"]
)
def test_commands_are_valid_shell(name: str) -> None:
    """The name of a file is never a command or an option."""
    for command in commands_of(SetupSpec(environment=name, wheels="it's wheels"), lock="").commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("requirements", "kept"),
    [
        ("einops\n", True),
        ("torch\n", True),
        ("torchvision==0.1\n", True),
        ("torch==2.3.0\n", False),
        ("torch>=2.3\n", False),
        ("  torch [opt] ~= 2.1\n", False),
        ("torch @ https://example.org/torch.whl\n", False),
    ],
)
def test_torch_of_the_image_is_kept_unless_the_file_asks_for_another(
    tmp_path: Path, requirements: str, kept: bool
) -> None:
    """Python's own part of the command, with pip replaced by a program that prints its constraints."""
    site = tmp_path / "site"
    (site / "torch-9.9+cu1.dist-info").mkdir(parents=True)
    (site / "torch-9.9+cu1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9+cu1\n")
    (site / "pip.py").write_text("import sys; print(open(sys.argv[sys.argv.index('-c') + 1]).read())")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "requirements.txt").write_text(requirements)
    (command,) = commands_of(SetupSpec(environment="requirements.txt")).commands
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(site)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("torch==9.9+cu1" if kept else "")
