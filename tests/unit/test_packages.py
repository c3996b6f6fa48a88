"""The commands of [setup] environment; tests/lab/product runs them on nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudddp.config import settings
from cloudddp.config.packages import commands_of, derived, download, read
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
    commands = commands_of(SetupSpec(environment="uv.lock"), {"uv.lock": lock}).commands
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
    for command in commands_of(SetupSpec(environment=name, wheels="it's wheels"), {}).commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "files", "kept"),
    [
        ("requirements.txt", {"requirements.txt": "einops\n"}, True),
        ("requirements.txt", {"requirements.txt": "torch\n"}, True),
        ("requirements.txt", {"requirements.txt": "torchvision==0.1\n"}, True),
        ("requirements.txt", {"requirements.txt": "torch==2.3.0\n"}, False),
        ("requirements.txt", {"requirements.txt": "torch>=2.3\n"}, False),
        ("requirements.txt", {"requirements.txt": "torch!=2.0\n"}, False),
        ("requirements.txt", {"requirements.txt": "  torch [opt] ~= 2.1\n"}, False),
        ("requirements.txt", {"requirements.txt": "Torch @ https://example.org/torch.whl\n"}, False),
        (
            "requirements.txt",
            {"requirements.txt": "-r sub/base.txt\n", "sub/base.txt": "torch==2.3\n"},
            False,
        ),
        (
            "pyproject.toml",
            {"pyproject.toml": '[project]\ndependencies = ["einops", "torch==2.3.0"]\n'},
            False,
        ),
        ("pyproject.toml", {"pyproject.toml": '[project]\ndependencies = ["torch"]\n'}, True),
        ("pyproject.toml", {"pyproject.toml": "project = 1\n"}, True),
        ("pyproject.toml", {"pyproject.toml": "torch==2.3.0\n"}, True),
    ],
)
def test_torch_of_the_image_is_kept_unless_the_file_asks_for_another(
    tmp_path: Path, name: str, files: dict[str, str], kept: bool
) -> None:
    """The command, with pip replaced by a program that prints its constraints."""
    site = tmp_path / "site"
    (site / "torch-9.9+cu1.dist-info").mkdir(parents=True)
    (site / "torch-9.9+cu1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9+cu1\n")
    (site / "pip.py").write_text(
        "import sys\nif '-c' in sys.argv: print(open(sys.argv[sys.argv.index('-c') + 1]).read())"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    project = tmp_path / "project"
    for path, text in files.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    found = commands_of(SetupSpec(environment=name), read(project, name))
    assert set(found.inputs) == set(files)
    (command,) = found.commands
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(site)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("torch==9.9+cu1" if kept else "")


def test_files_that_include_each_other_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("-r b.txt\n--requirement=../out.txt\n-r /etc/hosts\n-r missing.txt\n")
    (tmp_path / "b.txt").write_text("-r a.txt\neinops\n")
    assert set(read(tmp_path, "a.txt")) == {"a.txt", "b.txt"}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("requirements.txt", "pip download -d wheels -r requirements.txt"),
        ("pyproject.toml", "pip download -d wheels ./"),
        (
            "uv.lock",
            "uv export --frozen --no-emit-project -o wheels.txt && pip download -d wheels uv -r wheels.txt",
        ),
    ],
)
def test_command_that_fills_a_folder_of_wheels(name: str, command: str) -> None:
    assert download(name) == command


def test_wheels_for_conda_are_refused() -> None:
    with pytest.raises(UsageError, match="conda installs no wheels"):
        resolved(environment="environment.yml", wheels="wheels")


def test_environment_of_conda_is_made_anew(tmp_path: Path) -> None:
    """What the file no longer names is gone: the command, with conda replaced by a program of a line."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "micromamba").write_text('#!/bin/sh\nmkdir .conda && echo "$@" > .conda/made\n')
    (tmp_path / "bin" / "micromamba").chmod(0o755)
    (command,) = commands_of(SetupSpec(environment="environment.yml"), {}).commands
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, check=True
        )
        assert (tmp_path / ".conda" / "made").read_text() == "create -y -p ./.conda -f environment.yml\n"
        (tmp_path / ".conda" / "left").touch()
