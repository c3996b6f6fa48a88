"""`init`: start a project."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path

from cloudddp import local_state
from cloudddp.cli.console import Console
from cloudddp.config.command_line import GlobalOptions
from cloudddp.config.project import CONFIG_NAME
from cloudddp.config.schema import example_name, example_toml
from cloudddp.errors import Command, UsageError
from cloudddp.files import EXAMPLES, payload_example, resolved
from cloudddp.text import one_line

_DEFAULT = "ddp"
_SYNONYMS = {"digits": _DEFAULT}  # an earlier name
_LAUNCH = {"ddp": "train.py", "trainer": "train/main.py"}
_SHOWN = 3  # other clusters
_REQUIREMENTS = "requirements.txt"
# What the requirements are for.
_MODULES = {"ddp": "sklearn, torch", "trainer": "sklearn, tensorboard, torch, torchvision, tyro"}


def init(console: Console, _: GlobalOptions, *, folder: Path | None, example: str | None) -> None:
    example, folder = _example_and_folder(example, folder)
    files = payload_example(example) if example else {}
    written: list[str] = []
    failed: UsageError | None = None
    try:
        existing = [path for path in (folder / name for name in (CONFIG_NAME, *files)) if path.exists()]
        if existing:
            raise UsageError(
                f"{existing[0]} already exists; nothing was written",
                hint="choose another folder, or remove it",
            )
        _write_project(folder, example, files, written)
    except OSError as error:
        failed = UsageError(
            f"cannot write {error.filename or folder}: {one_line(str(error.strerror or error), 200)}",
            hint=("choose another folder: ", Command("init", "FOLDER")),
        )
    for path in written:
        console.print(f"wrote {path}")
    if failed:
        raise failed
    name = example_name(folder)
    for other in sorted({record.name for record in local_state.live_clusters()} - {name})[:_SHOWN]:
        console.log(
            f"cluster {other!r}, created on this computer, may be up (-c {other}); here it is {name!r}"
        )
    if not example:
        console.log(
            "next: edit cloudddp.toml, then ",
            Command("up", "--dry-run"),
            " (shows what would be created), ",
            Command("up"),
            " and ",
            Command("launch", "SCRIPT"),
        )
    else:
        there = "" if resolved(folder) == resolved(Path.cwd()) else f"cd {folder} && "
        console.log(f"next: {there}cloudddp --sim up && cloudddp --sim launch {_LAUNCH[example]}")


def _example_and_folder(example: str | None, folder: Path | None) -> tuple[str | None, Path]:
    """Return the name of an example, or None, and the folder. In `--example my-project` the value, which the
    option may lack, is the folder. Raises UsageError."""
    name = _SYNONYMS.get(example, example) if example else None
    if name is None or name in EXAMPLES:
        return name, folder or Path()
    if folder is None and not difflib.get_close_matches(name, EXAMPLES):
        return _DEFAULT, Path(name)
    raise UsageError(
        f"--example: no example {name!r}",
        hint=(
            f"available: {', '.join(EXAMPLES)}; for a folder of that name: ",
            Command("init", f"--example={_DEFAULT}", "FOLDER"),
        ),
    )


def _setup(example: str | None) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the settings that install what an example requires, only where something is missing: an image
    has its own build of torch, and a simulated node has no network."""
    if example is None:
        return {}
    install = f"python3 -c 'import {_MODULES[example]}' 2>/dev/null || pip install -r {_REQUIREMENTS}"
    return {("setup", "run"): (install,), ("setup", "inputs"): (_REQUIREMENTS,)}


def _write_project(folder: Path, example: str | None, files: Mapping[str, Path], written: list[str]) -> None:
    """Write the files, and append each to `written`; of an example's folder only its name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / CONFIG_NAME
    config.write_text(example_toml(example_name(folder), _setup(example)))
    written.append(str(config))
    ignored = folder / ".gitignore"
    if not ignored.exists():
        ignored.write_text("/runs/\n/results/\n")
        written.append(str(ignored))
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        top, deeper, _ = name.partition("/")
        if (shown := f"{folder / top}{deeper}") not in written:
            written.append(shown)
