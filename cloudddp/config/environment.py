"""[setup] environment: the commands that install what a file of the project lists, and the Python that has
it then. Pure but for reading uv.lock.

A requirements file or pyproject.toml is installed with pip into the image's environment, and keeps its torch:
that one fits the driver, and a rank that gets another build from PyPI may find no GPU. uv.lock and
environment.yml make an environment of their own in the project, `.venv` or `.conda`.
"""

from __future__ import annotations

import json
import posixpath
import shlex
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cloudddp.config.spec import Config, SetupSpec

LOCK, PROJECT = "uv.lock", "pyproject.toml"
VENV, CONDA = ".venv", ".conda"  # folders in the project on the nodes

# pip may replace torch only where the file itself asks for a version of it.
_KEPT = """\
import importlib.metadata as m, re, sys
text = open(sys.argv[1], encoding="utf-8").read()
if not re.search(r"(?mi)^[\\s\\"']*torch\\s*(\\[[^]]*\\]\\s*)?(==|===|~=|<|>|@)", text):
    try:
        print("torch==" + m.version("torch"))
    except m.PackageNotFoundError:
        pass
"""
_NO_CONDA = "this image has no micromamba, mamba or conda; list the packages in requirements.txt"


@dataclass(frozen=True, slots=True)
class Installed:
    """What installs an environment: shell commands, the files that rerun them, and the Python that has it; ''
    for that of the image."""

    commands: tuple[str, ...]
    inputs: tuple[str, ...]
    python: str = ""


def derived(root: Path, config: Config) -> Config:
    """Return the settings with what others mean for them: the commands of [setup] environment come before
    those of [setup] run, and [[data]] is no result."""
    spec, job = config.setup, config.job
    if config.data:
        job = msgspec.structs.replace(job, scratch=(*job.scratch, *(one.place for one in config.data)))
    if spec.environment is None:
        return msgspec.structs.replace(config, job=job)
    installed = commands_of(spec, lock=_read(root / spec.environment))
    setup = msgspec.structs.replace(
        spec,
        run=(*installed.commands, *spec.run),
        inputs=tuple(dict.fromkeys((*installed.inputs, *spec.inputs))),
    )
    job = msgspec.structs.replace(job, python=job.python or installed.python)
    return msgspec.structs.replace(config, setup=setup, job=job)


def commands_of(spec: SetupSpec, *, lock: str = "") -> Installed:
    """Return what installs `spec.environment`; `lock`: the text of a uv.lock. Pure."""
    name = spec.environment or ""
    found = _installed(spec, name, lock)
    # The first line says what the command is for, in messages and in the setup's log.
    return replace(found, commands=tuple(f"{title(name)}\n{command}" for command in found.commands))


def title(name: str) -> str:
    """Return the first line of each command that installs a file's packages."""
    return f"# install {json.dumps(name)}"


def _installed(spec: SetupSpec, name: str, lock: str) -> Installed:
    folder, base = posixpath.split(posixpath.normpath(name))
    wheels = f" --no-index --find-links {shlex.quote(spec.wheels)}" if spec.wheels else ""
    if base == LOCK:
        return _uv(folder, wheels, has_torch=_locks_torch(lock))
    if base.endswith((".yml", ".yaml")):
        return _conda(name)
    what = f"-e {shlex.quote('./' + folder)}" if base == PROJECT else f"-r {shlex.quote(name)}"
    install = (
        f'kept=$(mktemp) && python -c {shlex.quote(_KEPT)} {shlex.quote(name)} > "$kept" && '
        f'python -m pip install --disable-pip-version-check{wheels} -c "$kept" {what}'
    )
    return Installed((install,), (name,))


def _uv(folder: str, wheels: str, *, has_torch: bool) -> Installed:
    """A lock that has torch is installed alone; beside any other one the image's torch is visible."""
    here = f"cd {shlex.quote(folder)} && " if folder else ""
    shown = "" if has_torch else " --system-site-packages"
    return Installed(
        (
            f"python -m uv --version || python -m pip install --disable-pip-version-check{wheels} uv",
            f'{here}test -e {VENV} || python -m uv venv{shown} --python "$(command -v python)" {VENV}',
            f"{here}python -m uv sync --frozen --inexact --no-dev{wheels}",
        ),
        tuple(posixpath.join(folder, name) for name in (LOCK, PROJECT)),
        posixpath.join(folder, VENV, "bin/python"),
    )


def _conda(name: str) -> Installed:
    file = shlex.quote(name)
    return Installed(
        (
            "conda=$(command -v micromamba || command -v mamba || command -v conda) || "
            f"{{ echo {shlex.quote(_NO_CONDA)} >&2; exit 1; }}; "
            f'test -e {CONDA} || "$conda" create -y -p ./{CONDA} -f {file} || '
            f'"$conda" env create -y -p ./{CONDA} -f {file}',
        ),
        (name,),
        f"{CONDA}/bin/python",
    )


def _locks_torch(lock: str) -> bool:
    try:
        packages = tomllib.loads(lock).get("package", [])
    except (ValueError, RecursionError):
        return False  # `uv sync` reports it
    return isinstance(packages, list) and any(
        isinstance(one, dict) and one.get("name") == "torch" for one in packages
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.name == LOCK else ""
    except (OSError, ValueError):
        return ""  # `launch` reports that it is missing
