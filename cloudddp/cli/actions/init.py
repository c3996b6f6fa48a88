"""`init`: start a project."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cloudddp import payload
from cloudddp.cli.console import Console
from cloudddp.config import example as examples
from cloudddp.config.options import GlobalOptions
from cloudddp.config.project import CONFIG_NAME
from cloudddp.errors import Command, UsageError
from cloudddp.safe_files import resolved
from cloudddp.text import one_line


def init(console: Console, _: GlobalOptions, *, folder: Path, example: str | None) -> None:
    config, code = folder / CONFIG_NAME, folder / "train"
    written: list[str] = []
    failed: UsageError | None = None
    try:
        existing = [path for path in (config, *([code] if example else [])) if path.exists()]
        if existing:
            raise UsageError(
                f"{existing[0]} already exists; nothing was written", hint="choose another folder, or remove it"
            )  # fmt: skip
        _write_project(folder, config, code if example else None, written)
    except OSError as error:
        failed = UsageError(
            f"cannot write {error.filename or folder}: {one_line(str(error.strerror or error), 200)}",
            hint=("choose another folder: ", Command("init", "FOLDER")),
        )
    for path in written:
        console.print(f"wrote {path}")
    if failed:
        raise failed
    if not example:
        console.log(
            "next: edit cloudddp.toml, then ", Command("up", "--dry-run"), " (shows what would be created), ", Command("up"), " and ",
            Command("launch", "SCRIPT"),
        )  # fmt: skip
    else:
        there = "" if resolved(folder) == resolved(Path.cwd()) else f"cd {folder} && "
        console.log(f"next: {there}cloudddp --sim up && cloudddp --sim launch -m train.main --dataset digits")


def _write_project(folder: Path, config: Path, code: Path | None, written: list[str]) -> None:
    """Write the files, and append each to `written`."""
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(examples.toml(examples.name_for(folder)))
    written.append(str(config))
    ignored = folder / ".gitignore"
    if not ignored.exists():
        ignored.write_text("/runs/\n/results/\n")
        written.append(str(ignored))
    if code is not None:
        shutil.copytree(payload.example(), code, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        written.append(f"{code}{os.sep}")
