"""[setup] environment: the commands that install what a file of the project lists, and the Python that has
it then. Pure but for `derived`, which reads that file, and what it names.

A requirements file or pyproject.toml is installed with pip into the image's environment, and keeps its torch:
that one fits the driver, and a rank that gets another build from PyPI may find no GPU. uv.lock and
environment.yml make an environment of their own in the project, `.venv` or `.conda`.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudddp.config.package_inputs import LOCK, PROJECT, PackageInputs, local_sources, read, toml
from cloudddp.config.spec import Config, SetupSpec

VENV, CONDA = ".venv", ".conda"  # folders in the project on the nodes
NO_PIP = "the Python of this image has no pip"

# pip may replace torch only where a file asks for a version of it. This prints the constraint that keeps it.
_KEPT = """\
import importlib.metadata as m
try:
    print("torch==" + m.version("torch"))
except m.PackageNotFoundError:
    pass
"""
# pip does not read a wheel whose version is installed. This prints the packages whose wheels have changed.
_REBUILT = """\
import importlib.metadata as m, os, sys, zipfile, zlib
def read(path):
    return zlib.crc32(path.read_bytes()) if path.exists() else None
for path in sys.argv[1:]:
    name, version = (os.path.basename(path) + "--").split("-")[:2]
    try:
        there, files = m.distribution(name), zipfile.ZipFile(path).infolist()
    except (m.PackageNotFoundError, OSError, ValueError, zipfile.BadZipFile):
        continue
    new = {one.filename: one.CRC for one in files if not one.filename.endswith(("/", "RECORD"))}
    old = [str(one) for one in there.files or () if str(one).endswith((".py", ".so"))]
    changed = any(read(there.locate_file(one)) != new.get(one) for one in {*old, *new})
    if changed and there.version == version and name != "torch":
        print(name)
"""
# A virtual environment sees the packages of its base, and that of the image may be one itself: this makes the
# image's packages visible, after its own, in an environment that has no torch.
_SHOW_IMAGE = f"""\
import glob, sys
(own,) = glob.glob("{VENV}/lib/python3*/site-packages")
with open(own + "/of_the_image.pth", "w") as file:
    for path in [] if glob.glob(own + "/torch-*.dist-info") else sys.path:
        if path.endswith("-packages"):
            print(f"import site; site.addsitedir({{path!r}})", file=file)
"""
# setuptools would add modules that were removed to a wheel again, from the `build` folder of the last one.
_BEGIN = """\
set -eo pipefail; unset VIRTUAL_ENV
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DIST_EXTRA_CONFIG=$work/setup.cfg
printf '[build]\\nbuild_base=%s\\n' "$work/build" > "$DIST_EXTRA_CONFIG"
"""
# For this user, beside the packages of the operating system, where that manages its Python (PEP 668).
_PIP = f"""\
: "${{python:?this image has no Python}}"
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$python" -m pip)
"${{pip[@]}}" --version > /dev/null 2>&1 || {{
@@GET@@; }} || {{ echo {shlex.quote(NO_PIP)} >&2; exit 1; }}
"""
_FROM_WHEELS = 'wheel=$(ls {0}/pip-*.whl | tail -n 1) && pip=("$python" "$PWD/$wheel/pip")'
_FROM_SYSTEM = (
    '"$python" -m ensurepip > /dev/null 2>&1 || { sudo -n apt-get -qq update && '
    "sudo -n apt-get -qq install --no-install-recommends python3-pip; } || "
    "sudo -n dnf -qy install python3-pip"
)
_TORCH_VERSION = re.compile(
    r"torch\s*(\[[^]]*\]\s*)?\(?\s*(==|===|!=|~=|<|>|@)|(https?|file):.*\btorch-\d", re.IGNORECASE
)
_OF_TORCH = r"(torch|triton|nvidia-[a-z0-9-]+) *([;#].*)?$"  # without a version
_NO_CONDA = "this image has no micromamba, mamba or conda; list the packages in requirements.txt"


def derived(root: Path, config: Config) -> Config:
    """Return the settings with what others mean for them: the command of [setup] environment comes before
    those of [setup] run, and what nodes read from S3 is no result. (Local data is not, either, while it is as
    it was sent.)"""
    spec, job = config.setup, config.job
    if copied := tuple(one.place for one in config.data if one.is_s3):
        job = replace(job, scratch=(*job.scratch, *copied))
    if spec.environment is None:
        return replace(config, job=job)
    command, python = installation(spec, read(root, spec), job.python)
    setup = replace(spec, run=(command, *spec.run))
    job = replace(job, python=job.python or python)
    return replace(config, setup=setup, job=job)


def installation(spec: SetupSpec, inputs: PackageInputs, python: str = "") -> tuple[str, str]:
    """Return the shell command that installs `spec.environment` for ranks that run with `python`, and the
    Python that has it then; '' for the image's. Pure."""
    name = spec.environment or ""
    folder, base = posixpath.split(posixpath.normpath(name))
    if base == LOCK:
        command = _uv(spec, folder, inputs.texts.get(posixpath.normpath(name), ""))
        python = posixpath.join(folder, VENV, "bin/python")
    elif takes_wheels(base):
        command, python = _pip(spec, folder, inputs, python), ""
    else:
        command, python = _conda(name), f"{CONDA}/bin/python"
    # The first line says what the command is for, in messages and in the setup's log.
    return f"{title(name)}\n{command}", python


def title(name: str) -> str:
    """Return the first line of the command that installs a file's packages."""
    return f"# install {json.dumps(name)}"


def download(spec: SetupSpec, inputs: PackageInputs) -> str:
    """Return the command that fills a folder of wheels on the user's computer, for nodes that reach no
    package index. Pure."""
    name = spec.environment or "requirements.txt"
    base = posixpath.basename(name)
    pip = f"pip download -d {shlex.quote(spec.wheels or 'wheels')} pip"
    if base == LOCK:
        return f"uv export {_exported(spec)} --no-emit-project -o wheels.txt && {pip} uv -r wheels.txt"
    if base == PROJECT:
        return f"{pip} {_project(spec, posixpath.dirname(name))}"
    lists = {path: text for path, text in inputs.texts.items() if not path.endswith(".toml")}
    if keeps_torch(spec, inputs) and any(re.search(rf"(?mi)^ *{_OF_TORCH}", one) for one in lists.values()):
        pattern = f"^ *(-[rc]|--[rc]|{_OF_TORCH})"
        return f"{pip} -r <(grep -hviE {shlex.quote(pattern)} {shlex.join(lists)})"
    return f"{pip} -r {shlex.quote(name)}"


def takes_wheels(name: str) -> bool:
    """Return whether the packages of a file can come from a folder of wheels."""
    return not name.endswith((".yml", ".yaml"))


def keeps_torch(spec: SetupSpec, inputs: PackageInputs) -> bool:
    """Return whether pip may not replace the image's torch: no file names a version of it."""
    listed = [one for path, text in inputs.texts.items() for one in _listed(spec, path, text)]
    return not any(_TORCH_VERSION.match(one.strip()) for one in listed)


def _listed(spec: SetupSpec, path: str, text: str) -> list[str]:
    """Return the lines of a requirements file, and the requirements in a pyproject.toml."""
    if posixpath.basename(path) != PROJECT:
        return text.splitlines()
    project = _table(toml(text), "project")
    extras = _table(project, "optional-dependencies")
    found = [project.get("dependencies"), *(extras.get(extra) for extra in spec.extras)]
    return [one for some in found if isinstance(some, list) for one in some if isinstance(one, str)]


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def _project(spec: SetupSpec, folder: str) -> str:
    extras = f"[{','.join(spec.extras)}]" if spec.extras else ""
    return shlex.quote(f"./{folder}{extras}")


def _ready(wheels: str | None) -> str:
    """Return the lines after which `"${pip[@]}"` installs with `$python`."""
    return _PIP.replace("@@GET@@", _FROM_WHEELS.format(shlex.quote(wheels)) if wheels else _FROM_SYSTEM)


def _offline(folder: str | None) -> str:
    return f" --no-index --find-links {shlex.quote(folder)}" if folder else ""


def _pip(spec: SetupSpec, folder: str, inputs: PackageInputs, python: str) -> str:
    name, wanted = spec.environment or "", "python3"
    if python:
        wanted = f'"$HOME"{shlex.quote(python[1:])}' if python.startswith("~/") else shlex.quote(python)
    is_project = posixpath.basename(name) == PROJECT
    what = f"-e {_project(spec, folder)}" if is_project else f"-r {shlex.quote(name)}"
    kept = f'"$python" -c {shlex.quote(_KEPT)}' if keeps_torch(spec, inputs) else ":"
    archives = " ".join(
        f"{shlex.quote(one)}{'' if one.endswith('.whl') else '/*.whl'}"
        for one in inputs.whole
        if one not in inputs.texts
    )
    return (
        f"{_BEGIN}"
        f"python=$(command -v {wanted} || command -v python3 || command -v python || :)\n"
        f"{_ready(spec.wheels)}"
        f'rebuilt=$("$python" -c {shlex.quote(_REBUILT)} {archives})\n'
        '[ -z "$rebuilt" ] || "${pip[@]}" uninstall -qy $rebuilt\n'
        f'{kept} > "$work/kept"\n'
        # What is there already fills a screen for each node.
        f'"${{pip[@]}}" install{_offline(spec.wheels)} -c "$work/kept" {what} | '
        "sed -u '/^Requirement already satisfied/d'"
    )


def _exported(spec: SetupSpec) -> str:
    """Return the options of `uv export` for wheels: no hashes, which pip would then want of every package."""
    return f"--frozen --no-dev --no-hashes{_extras(spec)}"


def _extras(spec: SetupSpec) -> str:
    return "".join(f" --extra {shlex.quote(extra)}" for extra in spec.extras)


def _uv(spec: SetupSpec, folder: str, lock: str) -> str:
    """Return the command for an environment of the packages in the lock; unless it then has torch, those of
    the image are visible in it, too."""
    names = [name for name, (kind, _) in local_sources(lock).items() if kind != "virtual"]
    # Otherwise uv keeps a package of the project while its pyproject.toml is as it was.
    anew = "".join(f" --reinstall-package {shlex.quote(name)}" for name in names)
    sync = f'uv sync --frozen --inexact --no-dev --python "$python"{_extras(spec)}'
    if spec.wheels:  # `uv sync` takes packages from where the lock says
        wheels = _offline(posixpath.relpath(spec.wheels, folder or "."))
        install = (
            f"{sync} --dry-run --offline --quiet\n"
            f'[ -e {VENV}/bin/python ] || uv venv --quiet --python "$python" {VENV}\n'
            f"uv export --quiet {_exported(spec)} | "
            f"uv pip install --python {VENV}/bin/python --no-deps --reinstall{wheels} -r -"
        )
    else:
        install = f"{sync}{anew}"
    return (
        f"{_BEGIN}"
        "python=${CLOUDDDP_IMAGE_PYTHON:-$(command -v python3 || :)}\n"
        "PATH=$PATH:$HOME/.cloudddp/uv/bin\n"
        f"command -v uv > /dev/null || {{ {_ready(spec.wheels)}"
        f'"${{pip[@]}}" install --quiet{_offline(spec.wheels)} --target ~/.cloudddp/uv uv; }}\n'
        f"{f'cd {shlex.quote(folder)}' if folder else ':'}\n"
        f"{install}\n"
        f'"$python" -c {shlex.quote(_SHOW_IMAGE)}'
    )


def _conda(name: str) -> str:
    file = shlex.quote(name)
    return (
        "conda=$(command -v micromamba || command -v mamba || command -v conda) || "
        f"{{ echo {shlex.quote(_NO_CONDA)} >&2; exit 1; }}; "
        f'rm -rf ./{CONDA} && "$conda" create -y -p ./{CONDA} -f {file} || '
        f'"$conda" env create -y -p ./{CONDA} -f {file}'
    )
