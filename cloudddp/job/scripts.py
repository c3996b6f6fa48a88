"""Which file of the project a launch starts: a path as the user typed it, or a module as `python -m` finds it.

It is resolved on the laptop, so that a misspelt script is refused before any node is created. It reads the file
system only.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from cloudddp.errors import UsageError
from cloudddp.job.new_job import Script

SHOWN = 10  # names in a hint
TORCHRUN = ("python", "python3", "torchrun", "torch.distributed.run", "torch.distributed.launch")


def find(
    root: Path, here: Path, script: Script, listed: Collection[str], env: Mapping[str, str] | None = None
) -> tuple[Script, str]:
    """Return the script by its path in the project `root`, and its file; a module stays as it is. The file need not be among
    those that are sent.

    `here` is the user's current folder, `listed` the paths of the project, for hints about modules, `env` the variables of
    the ranks, whose PYTHONPATH may name more folders of the project with modules. Raises UsageError.
    """
    if script.module:
        return script, _module(root, here, script.target, listed, env or {})
    file = _path(root, here, script.target)
    return Script(file, script.args), file


def _path(root: Path, here: Path, target: str) -> str:
    found = next((p for p in (here / target, root / target) if p.is_file()), None)
    if found is None:
        raise UsageError(
            f"script not found: {target} (in {here})",
            hint=f"omit {target}: cloudddp starts it"
            if target in TORCHRUN
            else "give its path, or -m MODULE",
        )
    inside_root = Path(os.path.normpath(found.absolute()))
    if not inside_root.is_relative_to(root):  # the same folder by another path
        inside_root, root = Path(os.path.realpath(inside_root)), Path(os.path.realpath(root))
    if not inside_root.is_relative_to(root):
        raise UsageError(
            f"script {target} is outside the project {root}, so it would not be on the nodes",
            hint="run cloudddp in the script's own project, or give --config",
        )
    return inside_root.relative_to(root).as_posix()


# -- modules -----------------------------------------------------------------------------------------------


def _module(root: Path, here: Path, target: str, sent: Collection[str], env: Mapping[str, str]) -> str:
    """Return the path of the file that `python -m TARGET` runs in the project's folder."""
    folders = ["", *_relative(env.get("PYTHONPATH", ""))]
    for folder in folders if all(target.split(".")) and "/" not in target else ():
        if file := _file_of(root, folder, target):
            return file
    what = f"no module {target!r} in {root}"
    if target and any((root / folder / Path(*target.split("."))).is_dir() for folder in folders):
        what = f"module {target} is a package without __main__.py"
    for entry in env.get("PYTHONPATH", "").split(":"):
        inside = os.path.relpath(entry, root) if entry.startswith("/") else ".."
        if not inside.startswith("..") and _file_of(root, inside, target):
            raise UsageError(
                f"{what}: PYTHONPATH has {entry}, a path of this computer", hint=f"write it as {inside}"
            )
    raise UsageError(what, hint=_advice(root, here, target, sent))


def _relative(path: str) -> list[str]:
    """Return the folders of a PYTHONPATH that lie in the project: ranks start in its folder."""
    cleaned = (os.path.normpath(entry) for entry in path.split(":") if entry and not entry.startswith("/"))
    return [entry for entry in cleaned if not entry.startswith("..") and entry != "."]


def _file_of(root: Path, folder: str, target: str) -> str:
    """Return the file of a module below a folder of the project, or '', by Python's own order of precedence.

    A package with __init__.py precedes a file of that name, which precedes a folder without __init__.py.
    """
    parts = target.split(".")
    for end in range(1, len(parts)):
        parent = root / folder / Path(*parts[:end])
        hidden = parent.is_dir() and not (parent / "__init__.py").is_file()
        if hidden and parent.with_name(parent.name + ".py").is_file():
            raise UsageError(
                f"{parent.name}.py hides the folder {parent.name}/, so there is no module {target}",
                hint=f"rename one of them, or make the folder a package: touch {parent.relative_to(root)}/__init__.py",
            )
    stem = (Path(folder) / Path(*parts)).as_posix()
    main = f"{stem}/__main__.py"
    order = [main] if (root / stem / "__init__.py").is_file() else [f"{stem}.py", main]
    return next((name for name in order if (root / name).is_file()), "")


def _advice(root: Path, here: Path, target: str, sent: Collection[str]) -> str:
    as_path = target if target.endswith(".py") else ""
    dotted = target.removesuffix(".py").replace("/", ".").strip(".")
    known = sorted(_modules(sent))
    if as_path and any((folder / as_path).is_file() for folder in (here, root)):
        return f"did you mean `-m {dotted}`, or {as_path} without -m?"
    if target in TORCHRUN:
        return f"omit -m {target}: cloudddp starts it"
    below = "" if here == root or not here.is_relative_to(root) else here.relative_to(root).as_posix()
    if below and _file_of(root, below, dotted):
        return f"did you mean `-m {below.replace('/', '.')}.{dotted}`? Modules are looked up from {root}"
    for folder in {name.split("/")[0] for name in sent if "/" in name}:
        if _file_of(root, folder, dotted):
            return f'it is in {folder}/: set [job] env = {{ PYTHONPATH = "{folder}" }} in cloudddp.toml'
    if inside := [name for name in known if name.startswith(f"{dotted}.")]:
        return f"its modules: {_listed(inside)}"
    if near := difflib.get_close_matches(dotted, known, n=3, cutoff=0.7):
        return "did you mean " + " or ".join(f"`-m {name}`" for name in near) + "?"
    run = f"import runpy; runpy.run_module({dotted!r}, run_name='__main__', alter_sys=True)"
    return (
        f"modules of the project: {_listed(known) or 'none'}\n"
        f"  -> a module that is installed on the nodes needs a script in the project: {run}"
    )


def _modules(sent: Collection[str]) -> Iterator[str]:
    """Yield the modules of the project that `-m` could start."""
    for name in sent:
        if name.endswith(".py") and not name.endswith("/__init__.py"):
            yield name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
