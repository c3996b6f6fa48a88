"""What the installation of [setup] environment reads: the file that lists packages, those that it includes,
and the packages and wheels of the project that they name. A change of any of it installs again. Reads files
of the project, and runs nothing.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp.config.project import CONFIG_NAME
from cloudddp.config.spec import SetupSpec

LOCK, PROJECT = "uv.lock", "pyproject.toml"
_BUILT_BY = (PROJECT, "setup.py", "setup.cfg")
_MOST = 500  # files and folders that name each other
_LONGEST = 64 << 20  # bytes of a file that lists packages

# A word of a requirements file or of environment.yml, with the option before it.
_WORD = re.compile(r"""(?:(?<!\S)(-[ercf]\s*|--[\w-]+(?:=|\s+)))?([^\s"',]+)""")
_IN_TOML = re.compile(r"""\bpath\s*=\s*["']([^"']+)|(file:[^"'\s]+)""")
_NAME = re.compile(r"^[\w.-]+(\[[^]]*\])?@")  # of `name@./path`
_VARIABLE = re.compile(r"^(file:)?/*\$\{\w+\}/+")  # `file://${PWD}/`


@dataclass(frozen=True, slots=True)
class PackageInputs:
    """Paths in the project. `texts`: files that list packages, and pyproject.toml of packages of the project,
    with what is in them; `whole`: files and folders that are read; `editable`: packages whose modules are
    imported where they are; `outside`: what is named and exists, but not in the project."""

    texts: Mapping[str, str]
    whole: tuple[str, ...] = ()
    editable: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def has(self, name: str, *, is_data: bool = False) -> bool:
        """Return whether the installation reads a file. Of an editable package it reads no module but each
        __init__.py, by which it finds packages."""
        if any(is_below(name, one) for one in self.whole):
            return True
        base = posixpath.basename(name)
        is_module = name.endswith(".py") and base not in ("setup.py", "__init__.py")
        ours = not (is_module or is_data or name == CONFIG_NAME)
        return ours and any(is_below(name, one) for one in self.editable)


def is_below(name: str, folder: str) -> bool:
    """Return whether a path of the project is this one, or in this folder; "." has all of them."""
    return folder in (".", name) or name.startswith(f"{folder}/")


def needed(setup: SetupSpec) -> list[str]:
    """Return the files without which nothing can be installed. Pure."""
    name = posixpath.normpath(setup.environment or "")
    folder, base = posixpath.split(name)
    return [name, *([posixpath.join(folder, PROJECT)] if base == LOCK else ())] if setup.environment else []


def read(root: Path, setup: SetupSpec) -> PackageInputs:
    """Return what installs `setup.environment`. What cannot be read is left out: `launch` reports it."""
    name = posixpath.normpath(setup.environment or "")
    texts: dict[str, str] = {}
    whole = [posixpath.normpath(setup.wheels)] if setup.wheels else []
    editable: list[str] = []
    outside: set[str] = set()
    waiting, seen = [(name, False)] if setup.environment else [], set[tuple[str, bool]]()
    while waiting and len(seen) < _MOST:
        path, is_editable = waiting.pop()
        path = posixpath.normpath(path)
        if (path, is_editable) in seen:
            continue
        seen.add((path, is_editable))
        there = root / path
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have; a wheel is no text
            if path.startswith(("..", "/")):
                outside |= {path} if path[0] != "/" and there.exists() else set()
            elif there.is_dir():
                is_package = any((there / file).is_file() for file in _BUILT_BY)
                (editable if is_editable and is_package else whole).append(path)
                if is_package:
                    waiting.append((posixpath.join(path, PROJECT), False))
            elif there.is_file():
                whole.append(path)
                if there.stat().st_size > _LONGEST:
                    continue
                texts[path] = there.read_text(encoding="utf-8")
                # uv follows no path but those in its lock.
                if posixpath.basename(name) != LOCK or path == name:
                    waiting += _named(path, texts[path])
                if path == name and posixpath.basename(path) == PROJECT:
                    editable.append(posixpath.dirname(path) or ".")
    return PackageInputs(texts, tuple(whole), tuple(editable), tuple(sorted(outside)))


def _named(path: str, text: str) -> Iterator[tuple[str, bool]]:
    """Yield the paths that a file may name, and whether as editable packages. Pure."""
    folder, base = posixpath.split(path)
    if base == LOCK:
        for other in (PROJECT, "uv.toml"):
            yield posixpath.join(folder, other), False
        for kind, where in local_sources(text).values():
            place = posixpath.join(folder, where)
            yield (posixpath.join(place, PROJECT) if kind == "virtual" else place), kind == "editable"
        return
    if base.endswith(".toml"):
        words = [("path", "".join(found)) for found in _IN_TOML.findall(text)]
    else:
        lines = text.replace("\\\n", " ").splitlines()
        words = [found for line in lines for found in _WORD.findall(re.sub(r"(^|\s)#.*", "", line))]
    for option, word in words:
        word = _VARIABLE.sub("", _NAME.sub("", word)).removeprefix("file:")
        word = re.split(r"[\[;#?]", word)[0]
        if not word or "://" in word or not (option or "/" in word or word.startswith(".")):
            continue
        # pip reads -r from the folder of the file, and packages from that of the project.
        for start in dict.fromkeys((folder, "")):
            yield posixpath.join(start, word), option.startswith(("-e", "--editable"))


def local_sources(lock: str) -> dict[str, tuple[str, str]]:
    """Return the packages of uv.lock that come from this computer: name -> kind of source and path. Pure."""
    packages = toml(lock).get("package")
    found = {}
    for one in packages if isinstance(packages, list) else ():
        source = one.get("source") if isinstance(one, dict) else None
        for kind, where in source.items() if isinstance(source, dict) else ():
            is_path = kind in ("editable", "virtual", "directory", "path", "registry")
            if is_path and isinstance(where, str) and "://" not in where:
                found[str(one.get("name"))] = (kind, where)
    return found


def toml(text: str) -> dict[str, Any]:
    """Return what is in a TOML file; nothing of one that is invalid, which the installation reports."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}
