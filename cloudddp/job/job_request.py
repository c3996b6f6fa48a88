"""A job that is to be started: its id, and its script as a file of the project. The user types a path (of a
Python script, or another program), or a module as `python -m` finds it; a misspelt one is refused before any
node is created. `status` needs this module, too: it imports nothing that takes long."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
import shlex
import string
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cloudddp.errors import Message, UsageError, q
from cloudddp.text import one_line, some

LONGEST_SCRIPT = 1000  # characters of a script and its arguments in a list of jobs
KEEP_MINUTES = 30.0  # minutes that nodes stay for a pull, unless --keep is given
_DIGITS = string.digits + string.ascii_lowercase  # in ASCII order


def _new_id() -> str:
    """Return a new job's id. Ids sort by time, to 1/1296 s: the first two of the last digits. The other two
    are random; launch_record.keep refuses an id that another job of the cluster has."""
    now = datetime.now(UTC)
    part = now.microsecond * len(_DIGITS) ** 2 // 1_000_000
    high, low = divmod(part, len(_DIGITS))
    random = secrets.choice(_DIGITS) + secrets.choice(_DIGITS)
    return f"{now:%Y%m%d-%H%M%S}-{_DIGITS[high]}{_DIGITS[low]}{random}"


_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Script:
    """What every rank runs: a file of the project, or with `module` a module as for `python -m`. `program`:
    the words that start it, where it is not written in Python."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    program: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The arguments of Python, through which programs are started, too, so that all get one
        environment."""
        return ["-ISc", _EXEC, *self.program, *self.args] if self.program else self._words

    @property
    def _words(self) -> list[str]:
        return (["-m"] if self.module else []) + [self.target, *self.args]

    @property
    def shown(self) -> str:
        """The script and its arguments as lists of jobs show them."""
        return one_line(shlex.join(self._words), LONGEST_SCRIPT)


@dataclass(frozen=True, slots=True)
class NewJob:
    """`poweroff`: minutes without a use after the job, until the nodes end, if they do; `keep`: likewise
    after a stall, with on_stall = "down". `resumed_from`: the id of the job that this one continues."""

    script: Script
    poweroff: float | None = None
    resumed_from: str = ""
    keep: float = KEEP_MINUTES
    id: str = field(default_factory=_new_id)


SHOWN = 10  # names in a hint
# Programs that start the ranks themselves, or Python, with the words that come before the script.
# Those that also install what the project needs, which the nodes do in [setup].
INSTALLERS = ("uv", "poetry", "pipenv", "conda", "pixi")
STARTERS: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("launch",),
    **dict.fromkeys((*INSTALLERS, "lightning", "fabric", "colossalai"), ("run",)),
    **dict.fromkeys(("deepspeed", "mpirun", "mpiexec", "srun"), ()),
}
SHELLS = (".sh", ".bash")
# setdefault() is not matched: it keeps torchrun's value.
_LOCALHOST = re.compile(
    r"""environ\[['"]MASTER_ADDR['"]\]\s*=\s*['"](localhost|127\.0\.0\.1)['"]|tcp://(localhost|127\.0\.0\.1):"""
)
TORCHRUN = ("python", "python3", "torchrun", "torch.distributed.run", "torch.distributed.launch")


def find_script(
    root: Path, here: Path, script: Script, listed: Collection[str], env: Mapping[str, str] | None = None
) -> tuple[Script, str]:
    """Return the script by its path in the project `root`, and its file; a module stays as it is. `here`: the
    user's current folder; `listed`: the paths of the project, for hints; `env`: the variables of the ranks,
    whose PYTHONPATH may name more folders with modules. Raises UsageError."""
    if script.module:
        return script, _module(root, here, script.target, listed, env or {})
    target = script.target
    if "/" not in target and not any((folder / target).is_file() for folder in (here, root)):
        if target in _entry_points(root):
            return Script(target, script.args, program=(target,)), "pyproject.toml"
        if target in (*STARTERS, *TORCHRUN):
            raise _starter(here, root, target, script.args)
    file = _path(root, here, target, listed)
    return Script(file, script.args, program=_program(root / file, file)), file


def _program(path: Path, file: str) -> tuple[str, ...]:
    """Return the words that start a file, () for one that is written in Python. Raises UsageError."""
    if file.endswith(".ipynb"):
        name = shlex.quote(file)
        raise UsageError(
            f"{file} is a notebook, which Python cannot run",
            hint=f"convert it: `jupyter nbconvert --to script {name}`, and launch "
            f"{file.removesuffix('.ipynb')}.py",
        )
    with contextlib.suppress(OSError), path.open("rb") as opened:
        first = opened.readline(200)
        if file.endswith(".py") or (first.startswith(b"#!") and b"python" in first):
            return ()
        if file.endswith(SHELLS):
            return ("bash", file)
        if first.startswith((b"#!", b"\x7fELF")):
            if not os.access(path, os.X_OK):
                raise UsageError(
                    f"{file} is a program, but not executable", hint=f"chmod +x {shlex.quote(file)}"
                )
            return (f"./{file}",)
    return ()


def localhost_line(path: Path) -> int:
    """Return the number of the first line that sets the rendezvous address to localhost, 0 for none."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as opened:
        for number, line in enumerate(opened, 1):
            if _LOCALHOST.search(line.partition("#")[0]):
                return number
    return 0


def _entry_points(root: Path) -> Collection[str]:
    """Return the programs that the project installs."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
        return tuple(project.get("scripts", {}))
    except (OSError, ValueError, AttributeError, TypeError):
        return ()


def _starter(here: Path, root: Path, target: str, args: Sequence[str]) -> UsageError:
    """Return the error for a program that would start the ranks, or Python, with the command that works."""
    is_script = [word == "-m" or (here / word).is_file() or (root / word).is_file() for word in args]
    at = is_script.index(True) if any(is_script) else None
    rest = ["SCRIPT"] if at is None else list(args[at:])
    omitted = [target, *(args[:at] if at is not None else STARTERS.get(target, ()))]
    installs = "; install what it needs with [setup] run in cloudddp.toml" if target in INSTALLERS else ""
    hint = Message(f"omit it: `cloudddp launch {q(*rest)}`{installs}")
    return UsageError(f"cloudddp starts the ranks itself, without `{shlex.join(omitted)}`", hint=hint)


def _path(root: Path, here: Path, target: str, listed: Collection[str]) -> str:
    found = next((p for p in (here / target, root / target) if p.is_file()), None)
    if found is None:
        hint = "give its path, or -m MODULE"
        if close := difflib.get_close_matches(target, listed, n=1, cutoff=0.75):
            hint = f"did you mean {close[0]}?"
        elif "/" not in target and "." not in target:
            hint += (
                "; for a program that is installed on the nodes, write a script with "
                f'`exec {shlex.quote(target)} "$@"` into NAME.sh and launch that'
            )
        raise UsageError(f"script not found: {target} (in {here})", hint=hint)
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
    cleaned = [os.path.normpath(one) for one in env.get("PYTHONPATH", "").split(":") if one]
    # In the project: ranks start in its folder.
    folders = ["", *(one for one in cleaned if one != "." and not one.startswith(("/", "..")))]
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


def _file_of(root: Path, folder: str, target: str) -> str:
    """Return the file of a module below a folder of the project, or '', by Python's order: a package with
    __init__.py, a file of that name, a folder without __init__.py."""
    parts = target.split(".")
    for end in range(1, len(parts)):
        parent = root / folder / Path(*parts[:end])
        hidden = parent.is_dir() and not (parent / "__init__.py").is_file()
        if hidden and parent.with_name(parent.name + ".py").is_file():
            raise UsageError(
                f"{parent.name}.py hides the folder {parent.name}/, so there is no module {target}",
                hint="rename one of them, or make the folder a package: touch "
                f"{parent.relative_to(root)}/__init__.py",
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
        return f"its modules: {some(inside, SHOWN)}"
    if near := difflib.get_close_matches(dotted, known, n=3, cutoff=0.7):
        return "did you mean " + " or ".join(f"`-m {name}`" for name in near) + "?"
    run = f"import runpy; runpy.run_module({dotted!r}, run_name='__main__', alter_sys=True)"
    return (
        f"modules of the project: {some(known, SHOWN) or 'none'}\n"
        f"  -> a module that is installed on the nodes needs a script in the project: {run}"
    )


def _modules(sent: Collection[str]) -> Iterator[str]:
    for name in sent:
        if name.endswith(".py") and not name.endswith("/__init__.py"):
            yield name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
