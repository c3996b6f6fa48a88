"""[setup] environment: the commands that install what a file of the project lists, and the Python that has
it then. Pure but for reading that file, and those that it includes.

A requirements file or pyproject.toml is installed with pip into the image's environment, and keeps its torch:
that one fits the driver, and a rank that gets another build from PyPI may find no GPU. uv.lock and
environment.yml make an environment of their own in the project, `.venv` or `.conda`.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cloudddp.config.spec import Config, SetupSpec

LOCK, PROJECT = "uv.lock", "pyproject.toml"
VENV, CONDA = ".venv", ".conda"  # folders in the project on the nodes
_MOST_FILES = 20  # requirements files that include each other

# pip may replace torch only where a file asks for a version of it. This prints the constraint that keeps it.
_KEPT = """\
import importlib.metadata as m
try:
    print("torch==" + m.version("torch"))
except m.PackageNotFoundError:
    pass
"""
_TORCH_VERSION = re.compile(
    r"torch\s*(\[[^]]*\]\s*)?\(?\s*(==|===|!=|~=|<|>|@)|(https?|file):.*\btorch-\d", re.IGNORECASE
)
_INCLUDED = re.compile(r"(?m)^\s*(?:-r|--requirement|-c|--constraint)[\s=]*(\S+)")
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
    those of [setup] run, and what nodes read from S3 is no result. (Local data is not, either, while it is as
    it was sent.)"""
    spec, job = config.setup, config.job
    if copied := tuple(one.place for one in config.data if one.is_s3):
        job = msgspec.structs.replace(job, scratch=(*job.scratch, *copied))
    if spec.environment is None:
        return msgspec.structs.replace(config, job=job)
    installed = commands_of(spec, read(root, spec.environment))
    setup = msgspec.structs.replace(
        spec,
        run=(*installed.commands, *spec.run),
        inputs=tuple(dict.fromkeys((*installed.inputs, *spec.inputs))),
    )
    job = msgspec.structs.replace(job, python=job.python or installed.python)
    return msgspec.structs.replace(config, setup=setup, job=job)


def commands_of(spec: SetupSpec, files: Mapping[str, str]) -> Installed:
    """Return what installs `spec.environment`; `files`: its text, and that of what it includes, by their
    paths. Pure."""
    name = spec.environment or ""
    found = _installed(spec, name, files)
    # The first line says what the command is for, in messages and in the setup's log.
    return replace(found, commands=tuple(f"{title(name)}\n{command}" for command in found.commands))


def title(name: str) -> str:
    """Return the first line of each command that installs a file's packages."""
    return f"# install {json.dumps(name)}"


def download(name: str, folder: str = "wheels") -> str:
    """Return the command that fills a folder of wheels on the user's computer, for nodes that reach no
    package index. Pure."""
    base = posixpath.basename(name)
    if base == LOCK:
        exported = "uv export --frozen --no-emit-project -o wheels.txt"
        return f"{exported} && pip download -d {shlex.quote(folder)} uv -r wheels.txt"
    what = f"./{posixpath.dirname(name)}" if base == PROJECT else f"-r {shlex.quote(name)}"
    return f"pip download -d {shlex.quote(folder)} {what}"


def takes_wheels(name: str) -> bool:
    """Return whether the packages of a file can come from a folder of wheels."""
    return not name.endswith((".yml", ".yaml"))


def _installed(spec: SetupSpec, name: str, files: Mapping[str, str]) -> Installed:
    folder, base = posixpath.split(posixpath.normpath(name))
    if base == LOCK:
        return _uv(folder, spec.wheels, has_torch=_locks_torch(files.get(name, "")))
    if not takes_wheels(base):
        return _conda(name)
    wheels = f" --no-index --find-links {shlex.quote(spec.wheels)}" if spec.wheels else ""
    what = f"-e {shlex.quote('./' + folder)}" if base == PROJECT else f"-r {shlex.quote(name)}"
    pip = f"python -m pip install --disable-pip-version-check{wheels}"
    # What is there already fills a screen for each node.
    shown = " | sed -u '/^Requirement already satisfied/d'"
    if any(_asks_for_torch(one, text) for one, text in files.items()):
        install = f"set -o pipefail; {pip} {what}{shown}"
    else:
        kept = f'kept=$(mktemp) && python -c {shlex.quote(_KEPT)} > "$kept"'
        install = f'set -o pipefail; {kept} && {pip} -c "$kept" {what}{shown}'
    return Installed((install,), tuple(dict.fromkeys((name, *files))))


def _asks_for_torch(name: str, text: str) -> bool:
    """Return whether a requirements file or pyproject.toml names a version of torch."""
    listed = text.splitlines()
    if posixpath.basename(name) == PROJECT:
        project = _toml(text).get("project")
        found = project.get("dependencies") if isinstance(project, dict) else None
        listed = found if isinstance(found, list) else []
    return any(isinstance(one, str) and _TORCH_VERSION.match(one.strip()) for one in listed)


def _uv(folder: str, wheels: str | None, *, has_torch: bool) -> Installed:
    """A lock that has torch is installed alone; beside any other one the image's torch is visible."""
    here = f"cd {shlex.quote(folder)} && " if folder else ""
    shown = "" if has_torch else " --system-site-packages"
    of_pip = of_uv = ""
    if wheels:
        of_pip = f" --no-index --find-links {shlex.quote(wheels)}"
        of_uv = f" --no-index --find-links {shlex.quote(posixpath.relpath(wheels, folder or '.'))}"
    return Installed(
        (
            f"python -m uv --version || python -m pip install --disable-pip-version-check{of_pip} uv",
            f'{here}test -e {VENV} || python -m uv venv{shown} --python "$(command -v python)" {VENV}',
            f"{here}python -m uv sync --frozen --inexact --no-dev{of_uv}",
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
            f'rm -rf ./{CONDA} && "$conda" create -y -p ./{CONDA} -f {file} || '
            f'"$conda" env create -y -p ./{CONDA} -f {file}',
        ),
        (name,),
        f"{CONDA}/bin/python",
    )


def _locks_torch(lock: str) -> bool:
    packages = _toml(lock).get("package")
    return isinstance(packages, list) and any(
        isinstance(one, dict) and one.get("name") == "torch" for one in packages
    )


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}  # the program that installs reports it


def read(root: Path, name: str) -> dict[str, str]:
    """Return the text of a file of the project, and of the requirements files that it includes, by their
    paths. What cannot be read is left out: `launch` reports it."""
    found: dict[str, str] = {}
    names = [posixpath.normpath(name)]
    while names and len(found) < _MOST_FILES:
        one = names.pop()
        try:
            text = (root / one).read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        found[one] = text
        if one.endswith(".txt"):
            beside = (
                posixpath.normpath(posixpath.join(posixpath.dirname(one), other))
                for other in _INCLUDED.findall(text)
            )
            names += [other for other in beside if other not in found and not other.startswith(("../", "/"))]
    return found
