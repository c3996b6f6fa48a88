"""`init`: looks at a project's folder, asks at most three questions, and writes a short cloudddp.toml."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudddp import local_state
from cloudddp.cli.console import Console
from cloudddp.config import project, settings
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.command_line import Flag
from cloudddp.config.project import CONFIG_NAME
from cloudddp.config.schema import example_name, toml_value
from cloudddp.errors import UsageError, q
from cloudddp.files import EXAMPLES, payload_example, resolved
from cloudddp.job import file_listing, project_scan
from cloudddp.job.project_scan import ScanResult
from cloudddp.text import one_line

_DEFAULT = "classic"
_SYNONYMS = {"ddp": "exact", "digits": "exact"}  # earlier names
_LAUNCH = {"classic": "train.py", "exact": "train.py", "trainer": "train/main.py"}
_SHOWN = 3  # other clusters, scripts
_REQUIREMENTS = "requirements.txt"
_QUESTIONS = {  # setting of [cluster] -> question
    "nodes": "How many nodes?",
    "instance_type": "Which instance type? (g5.xlarge: 1 NVIDIA A10G; p5.48xlarge: 8 H100)",
    "max_cost": "How many USD may the cluster cost at most? (0: no limit but its deadline)",
}


def init(console: Console, *, folder: Path | None, example: str | None) -> None:
    example, folder = _example_and_folder(example, folder)
    files = payload_example(example) if example else {}
    existing = [path for path in (folder / name for name in (CONFIG_NAME, *files)) if os.path.lexists(path)]
    if existing:
        what = f"{existing[0]} already exists; nothing was written"
        raise UsageError(what, hint="choose another folder, or remove it")
    name = example_name(folder)
    cluster: Mapping[str, Any] = {}
    if example:
        found = ScanResult(environment=_REQUIREMENTS, start=(_LAUNCH[example],))
    else:
        found = _look(folder)
        _report(console, found)
        cluster = _ask(console)
    outputs = ("checkpoints",) if example == _DEFAULT else tuple(found.saved)
    written: list[str] = []
    try:
        _write_project(folder, toml_of(name, cluster, found, outputs), files, written)
    except OSError as error:
        what = f"cannot write {error.filename or folder}: {one_line(str(error.strerror or error), 200)}"
        raise UsageError(what, hint="choose another folder: `cloudddp init FOLDER`") from None
    finally:
        for path in written:
            console.print(f"wrote {path}")
    for other in sorted({record.name for record in local_state.live_clusters()} - {name})[:_SHOWN]:
        what = f"cluster {other!r}, created on this computer, may be up (-c {other})"
        console.log(f"{what}; here it is {name!r}")
    start = q(*found.start or ["SCRIPT"])
    there = "" if resolved(folder) == resolved(Path.cwd()) else f"cd {q(folder)} && "
    console.log(f"next, a rehearsal on this computer: {there}cloudddp --sim run {start}")


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
        hint=f"available: {', '.join(EXAMPLES)}; for a folder of that name: `cloudddp init "
        f"{q(f'--example={_DEFAULT}')} FOLDER`",
    )


def _look(folder: Path) -> ScanResult:
    """Return what is in a project; nothing where the folder is new, or its files cannot be listed."""
    if not folder.is_dir() or project.holds_more(resolved(folder)):
        return ScanResult()
    try:
        ignored = file_listing.list_files(folder).ignored
        return project_scan.scan(folder, file_listing.ignored_by_git(folder) if ignored is None else ignored)
    except (OSError, UsageError):
        return ScanResult()


def _report(console: Console, found: ScanResult) -> None:
    """Log what was seen, and what it means."""
    for script in found.scripts[:_SHOWN]:
        saves = ", ".join(one_line(name, 60) for name, path in found.saved.items() if path == script.path)
        console.log(f"{script.path}: a training script{f'; it saves to {saves}' if saves else ''}")
    if found.environment:
        console.log(f"{found.environment}: its packages are installed on the nodes before ranks start")
    if found.modules:
        console.log(f"{found.modules}/: {found.scripts[0].path} imports from it; ranks get it as PYTHONPATH")
    for name in found.data:
        console.log(f"{name}/: git ignores it and a script names it; it is sent as data")
    for name, path in found.outside.items():
        where = f"{one_line(name, 100)}, outside the project"
        console.warn(f"{path} saves to {where}: `pull` does not fetch that")


def _ask(console: Console) -> dict[str, Any]:
    """Return the answers; without a terminal, none. Raises click.Abort at the end of the input."""
    answers: dict[str, Any] = {}
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return answers
    default = ClusterSpec()
    for key, question in _QUESTIONS.items():
        shown = "0" if key == "max_cost" else str(getattr(default, key))
        while True:
            text = console.ask(question, default=shown)
            if key == "max_cost" and text == "0":
                break
            try:
                layer = settings.from_flags([Flag(f"--{key.replace('_', '-')}", "cluster", key, text)])
                answers[key] = settings.check_value(layer, "cluster", key, text)
                break
            except UsageError as error:
                console.error(error)
    return answers


def toml_of(name: str, cluster: Mapping[str, Any], found: ScanResult, outputs: Sequence[str]) -> str:
    """Return a short cloudddp.toml, with these settings of [cluster]; `outputs` are only shown. Pure."""
    default = ClusterSpec()
    max_cost = cluster.get("max_cost")
    lines = [
        "# Settings of cloudddp; its docs/configuration.md lists all of them.",
        "[cluster]",
        f"name = {toml_value(name)}",
        f"nodes = {cluster.get('nodes', default.nodes)}",
        f"instance_type = {toml_value(cluster.get('instance_type', default.instance_type))}",
        f"max_hours = {default.max_hours:g}  # then the nodes terminate",
        f"{'# ' if max_cost is None else ''}max_cost = {max_cost or 20:g}  # USD, as an earlier deadline",
        "",
        "[job]",
        f"# outputs = {toml_value(tuple(outputs or ('runs',)))}  # "
        "default: `pull` fetches every file that the script writes",
        f"{'' if found.modules else '# '}env = {{ PYTHONPATH = {toml_value(found.modules or 'src')} }}"
        "  # where the script finds other modules of the project",
        "",
        "[setup]",
        f"{'' if found.environment else '# '}environment = {toml_value(found.environment or _REQUIREMENTS)}"
        "  # installed on the nodes before ranks start",
    ]
    for source in found.data:
        lines += ["", "[[data]]", f"source = {toml_value(source)}"]
    return "\n".join(lines) + "\n"


def _write_project(folder: Path, config: str, files: Mapping[str, Path], written: list[str]) -> None:
    """Write the files, and append each to `written`; of an example's folder only its name."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {CONFIG_NAME: config, ".gitignore": "/runs/\n/checkpoints/\n/results/\n/cloudddp-trial-*.json\n"}
    for path in (folder / name for name in texts):
        if path.name == CONFIG_NAME or not os.path.lexists(path):
            path.write_text(texts[path.name])
            written.append(str(path))
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        top, deeper, _ = name.partition("/")
        if (shown := f"{folder / top}{deeper}") not in written:
            written.append(shown)
