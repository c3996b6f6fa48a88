"""The commands of [setup] environment; tests/lab/product runs them on nodes."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.local_packages import package, wheel
from support.programs import program
from uv import find_uv_bin

from cloudddp.agent.protocol.start import SetupReply
from cloudddp.config import settings
from cloudddp.config.package_inputs import PackageInputs, read
from cloudddp.config.packages import NO_PIP, derived, download, installation
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config, SetupSpec
from cloudddp.errors import UsageError
from cloudddp.job.setup import install_error


def resolved(**setup: object) -> Config:
    return settings.resolve([Layer("file", {"setup": setup})])


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("requirements.txt", ""),
        ("pyproject.toml", ""),
        ("sub/uv.lock", "sub/.venv/bin/python"),
        ("environment.yml", ".conda/bin/python"),
    ],
)
def test_which_python_has_it(tmp_path: Path, name: str, python: str) -> None:
    """Before the user's own commands, which may use it."""
    config = derived(tmp_path, resolved(environment=name, run=["make ext"], inputs=["ext.c"]))
    assert (config.setup.run[-1], len(config.setup.run), config.job.python) == ("make ext", 2, python)


FILES = (
    *("base.txt", "cloudddp.toml", "conf/a.yml", "data/big", "dist/a.whl", "train.py"),
    *("libs/a/__init__.py", "libs/a/a.c", "libs/a/a.py", "libs/a/pyproject.toml"),
)
PACKAGE = {one for one in FILES if one.startswith("libs/")}
EDITABLE = PACKAGE - {"libs/a/a.py"}
LOCKED = '[[package]]\nname = "a"\nsource = {{ {} }}\n'


@pytest.mark.parametrize(
    ("name", "text", "files"),
    [
        ("requirements.txt", "einops\nlibs\n# ./libs/a\nhttps://example.org/libs/a\n/libs/a\n", set()),
        ("requirements.txt", "-rbase.txt", {"base.txt"}),
        ("requirements.txt", "einops\\\n --constraint=base.txt", {"base.txt"}),
        ("envs/gpu.txt", "-r ../base.txt\n./libs/a", {"base.txt"} | PACKAGE),
        ("requirements.txt", "a @ file:libs/a", PACKAGE),
        ("requirements.txt", "-e libs/a", EDITABLE),
        ("requirements.txt", f"-r {'x' * 300}\n./libs/a", PACKAGE),  # no file has such a name
        ("requirements.txt", "./dist/a.whl", {"dist/a.whl"}),
        ("requirements.txt", "--find-links dist", {"dist/a.whl"}),
        ("pyproject.toml", "", EDITABLE | {"base.txt", "conf/a.yml", "dist/a.whl"}),
        (
            "environment.yml",
            "dependencies:\n  - pip:\n    - -r base.txt\n    - ./libs/a",
            {"base.txt"} | PACKAGE,
        ),
        ("uv.lock", LOCKED.format('directory = "libs/a"'), PACKAGE),
        ("uv.lock", LOCKED.format('editable = "libs/a"'), EDITABLE),
        ("uv.lock", "package = [3, {source = 3}]", set()),
        ("uv.lock", "not a lock", set()),
    ],
)
def test_files_that_an_installation_reads(tmp_path: Path, name: str, text: str, files: set[str]) -> None:
    """A change of any of them installs again. Modules of an editable package are imported where they are."""
    for path in (*FILES, name):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / name).write_text(text)
    (tmp_path / "base.txt").write_text("-r missing.txt\n-r requirements.txt\n")
    found = read(tmp_path, SetupSpec(environment=name))
    assert found.has(name)
    assert {one for one in FILES if found.has(one, is_data=one == "data/big")} - {name} == files


def test_large_archive_is_an_input_and_not_loaded(tmp_path: Path) -> None:
    with (tmp_path / "torch.whl").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "requirements.txt").write_text("./torch.whl")
    found = read(tmp_path, SetupSpec(environment="requirements.txt"))
    assert found.has("torch.whl")
    assert found.texts.keys() == {"requirements.txt"}


@pytest.mark.parametrize(
    ("extras", "torch", "wheels"), [((), "of the image", None), (("gpu",), "of the lock", "wheels")]
)
def test_lock_is_installed_by_uv(
    tmp_path: Path, extras: tuple[str, ...], torch: str, wheels: str | None
) -> None:
    """The real uv, which pip brings. The image's torch is visible in an environment without one, also where
    the image is a virtual environment itself."""
    venv.create(tmp_path / "image")
    (site,) = tmp_path.glob("image/lib/python3*/site-packages")
    (site / "torch.py").write_text("TEXT = 'of the image'\n")
    (site / "pip.py").write_text(
        "import os, sys\nif '--target' in sys.argv:\n    os.makedirs(sys.argv[-2] + '/bin')\n"
        f"    os.symlink({find_uv_bin()!r}, sys.argv[-2] + '/bin/uv')\n"
    )
    project = tmp_path / "project"
    package(project / "libs/mine", "TEXT = 'first'\n")
    for name in ("greeting", "torch"):
        wheel(project / "wheels", name, "TEXT = 'of the lock'\n")
    (project / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "0"\nrequires-python = ">=3.9"\n'
        'dependencies = ["greeting", "mine"]\n'
        '[project.optional-dependencies]\ngpu = ["torch"]\n[tool.uv.sources]\nmine = {path = "libs/mine"}\n'
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "UV_OFFLINE": "1"}
    env["CLOUDDDP_IMAGE_PYTHON"] = f"{tmp_path}/image/bin/python"

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=project, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(find_uv_bin(), "lock", "--no-index", "--find-links", "wheels")
    setup = SetupSpec(environment="uv.lock", extras=extras, wheels=wheels)
    for text in ("first", "second"):
        (project / "libs/mine/mine.py").write_text(f"TEXT = {text!r}\n")
        (project / f"libs/mine/only_{text}.py").touch()
        run("bash", "-c", installation(setup, read(project, setup))[0])
        (project / f"libs/mine/only_{text}.py").unlink()
        show = (
            "import greeting, mine, pkgutil, torch; print(greeting.TEXT, mine.TEXT, torch.TEXT, "
            "*(one.name for one in pkgutil.iter_modules() if 'only' in one.name), sep=', ')"
        )
        assert run(".venv/bin/python", "-c", show) == f"of the lock, {text}, {torch}, only_{text}\n"


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        *(({"environment": name}, r"setup\.environment") for name in ("../x.txt", "/x.txt", "~/x.txt", "")),
        *(({"environment": name}, r"setup\.environment") for name in ("a/../x.txt", "x.lock", "train.py")),
        ({"environment": "requirements.txt", "extras": ["gpu"]}, r"with pyproject\.toml or uv\.lock only"),
        ({"environment": "environment.yml", "wheels": "wheels"}, "conda installs no wheels"),
    ],
)
def test_what_cannot_be_installed_is_refused(setup: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        resolved(**setup)


@pytest.mark.parametrize(
    "name", ["requirements.txt", "it's; touch x.txt", "-r.txt", "$(touch x).txt", "uv.lock"]
)
def test_commands_are_valid_shell(name: str) -> None:
    """The name of a file is never a command or an option."""
    setup = SetupSpec(environment=name, wheels="it's wheels")
    command = installation(setup, PackageInputs({name: ""}, (name, "$(touch x)")))[0]
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("requirements.txt", "einops\n", True),
        ("requirements.txt", "torch\n", True),
        ("requirements.txt", "torch==2.3.0\n", False),
        ("requirements.txt", "torch>=2.3\n", False),
        ("requirements.txt", "Torch @ https://example.org/torch.whl\n", False),
        ("requirements.txt", "-r sub/base.txt\n", False),
        ("pyproject.toml", '[project]\ndependencies = ["einops", "torch==2.3.0"]\n', False),
        ("pyproject.toml", "project = 1\n", True),
    ],
)
def test_torch_of_the_image_is_kept_unless_the_file_asks_for_another(
    tmp_path: Path, name: str, text: str, kept: bool
) -> None:
    """The command, with pip replaced by a program that prints its constraints."""
    site = tmp_path / "site"
    (site / "torch-9.9+cu1.dist-info").mkdir(parents=True)
    (site / "torch-9.9+cu1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9+cu1\n")
    (site / "pip.py").write_text(
        "import sys\nif '-c' in sys.argv: print(open(sys.argv[sys.argv.index('-c') + 1]).read())"
    )
    # As on Debian, whose python3 is no `python`.
    program(tmp_path / "bin" / "python3", f'exec {sys.executable} -S "$@"')
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "sub/base.txt").write_text("torch==2.3\n")
    (project / name).write_text(text)
    setup = SetupSpec(environment=name)
    command = installation(setup, read(project, setup))[0]
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(site)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("torch==9.9+cu1" if kept else "")


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("requirements.txt", "torch==2.3\n", "pip download -d wheels pip -r requirements.txt"),
        (
            "requirements.txt",
            "einops\ntorch\nnvidia-nccl-cu13 # of torch\ntorchvision\n",
            "pip download -d wheels pip -r <(grep -hviE "
            "'^ *(-[rc]|--[rc]|(torch|triton|nvidia-[a-z0-9-]+) *([;#].*)?$)' requirements.txt)",
        ),
        ("pyproject.toml", "", "pip download -d wheels pip ./"),
        (
            "uv.lock",
            "",
            "uv export --frozen --no-dev --no-hashes --no-emit-project -o wheels.txt && "
            "pip download -d wheels pip uv -r wheels.txt",
        ),
    ],
)
def test_command_that_fills_a_folder_of_wheels(name: str, text: str, command: str) -> None:
    assert download(SetupSpec(environment=name), PackageInputs({name: text})) == command


def test_pip_of_ensurepip_needs_no_package_of_the_system(tmp_path: Path) -> None:
    """The command, with Python and sudo replaced by programs of a few lines."""
    python = 'case "$*" in *--version) test -e pip;; *pip) touch pip;; *install*) echo "$@";; esac'
    for name, text in (("python3", python), ("sudo", "exit 1")):
        program(tmp_path / name, text)
    command = installation(SetupSpec(environment="requirements.txt"), PackageInputs({}))[0]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert "-m pip install" in done.stdout, done.stderr


def test_environment_of_conda_is_made_anew(tmp_path: Path) -> None:
    """What the file no longer names is gone: the command, with conda replaced by a program of a line."""
    program(tmp_path / "bin" / "micromamba", 'mkdir .conda && echo "$@" > .conda/made')
    command = installation(SetupSpec(environment="environment.yml"), PackageInputs({}))[0]
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, check=True
        )
        assert (tmp_path / ".conda" / "made").read_text() == "create -y -p ./.conda -f environment.yml\n"
        (tmp_path / ".conda" / "left").touch()


NO_SUCH = "ERROR: No matching distribution found for einops>=2\n"
CONFLICT = """\
The conflict is caused by:
    mine 1.0 depends on torch<2
    The user requested (constraint) torch==2.12.0+cu130
"""
PIP_BUILD = """\
Processing ./libs/mine
  × Preparing metadata (pyproject.toml) did not run successfully.
      RuntimeError: no compiler
      [end of output]
error: metadata-generation-failed
"""
UV_PYTHON = "resolved to Python 3.11.7, which is incompatible with the project's Python requirement: `>=3.13`"


@pytest.mark.parametrize(
    ("output", "wheels", "why", "hint"),
    [
        (NO_SUCH, "whl", "whl has no einops>=2 for the Python", "`pip download -d whl 'einops>=2'`"),
        (NO_SUCH, None, "no einops>=2 was found", "correct requirements.txt"),
        (f"ConnectTimeout\n{NO_SUCH}", None, "nodes reach no package index", "pip download -d wheels pip -r"),
        (NO_PIP, None, NO_PIP, "pip download -d wheels pip -r"),
        (
            CONFLICT,
            None,
            "mine 1.0 depends on torch<2, and torch 2.12.0+cu130 of the image is kept",
            "name the version of torch in requirements.txt",
        ),
        (UV_PYTHON, None, "need Python >=3.13, and the nodes have 3.11.7", "--image"),
        (PIP_BUILD, None, "libs/mine does not build: RuntimeError: no compiler", "correct libs/mine"),
        ("anything", "whl", "(exit code 1)", "correct requirements.txt"),
    ],
)
def test_reason_why_packages_were_not_installed(output: str, wheels: str | None, why: str, hint: str) -> None:
    setup = SetupSpec(environment="requirements.txt", wheels=wheels)
    error = install_error(0, SetupReply(1, output=output), setup, PackageInputs({}))
    assert why in error.message
    assert hint in str(error.hint)
