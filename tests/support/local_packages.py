"""Wheels, and packages that are built without a package index: each is one module, or few."""

from __future__ import annotations

import zipfile
from pathlib import Path

BACKEND = """
import configparser, os, pathlib, shutil, tomllib, zipfile
def build(folder, files):
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]
    info = f"{project['name']}-{project['version']}.dist-info"
    with zipfile.ZipFile(os.path.join(folder, path := f"{info[:-10]}-py3-none-any.whl"), "w") as file:
        for name, text in files(project["name"]).items():
            file.writestr(name, text)
        lines = [f"Requires-Dist: {one}\\n" for one in project.get("dependencies", [])]
        head = f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n"
        file.writestr(f"{info}/METADATA", head + "".join(lines))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(f"{info}/RECORD", "")
    return path
def build_wheel(folder, *_):
    config = configparser.ConfigParser()
    config.read(os.environ.get("DIST_EXTRA_CONFIG", ""))
    base = pathlib.Path(config.get("build", "build_base", fallback="build"))  # as setuptools does
    base.mkdir(exist_ok=True)
    for one in pathlib.Path().glob("*.py"):
        shutil.copy(one, base)
    return build(folder, lambda _: {one.name: one.read_text() for one in base.glob("*.py")})
def build_editable(folder, *_):
    return build(folder, lambda name: {f"{name}.pth": os.getcwd()})
"""


def package(folder: Path, text: str, more: str = "") -> None:
    """Write a package with the name of its folder, whose build needs nothing. `more` is of its [project]."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backend.py").write_text(BACKEND)
    (folder / f"{folder.name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{folder.name}"\nversion = "1.0"\n{more}'
    )


def wheel(folder: Path, name: str, text: str, **modules: str) -> None:
    """Write a wheel, as `pip download` would: the same one for the same text. `modules`: those of a
    package."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        **({f"{name}/__init__.py": text} if modules else {f"{name}.py": text}),
        **{f"{name}/{path}.py": content for path, content in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, content in files.items():
            file.writestr(zipfile.ZipInfo(path), content)
