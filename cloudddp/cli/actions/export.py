"""`export`: the job as a script for another launcher. Calls nothing: neither AWS nor a node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.config.command_line import Flag, GlobalOptions, variable_flags
from cloudddp.config.value_checks import RESERVED_ENVIRONMENT
from cloudddp.errors import UsageError
from cloudddp.files import Folder, resolved
from cloudddp.job import project_files
from cloudddp.job import slurm as renderer
from cloudddp.job.job_request import Script, find_script
from cloudddp.text import one_line


def slurm(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    module: bool,
    output: str | None,
    variables: Sequence[str],
    env_files: Sequence[str],
    script: str,
    args: Sequence[str],
    **of_cluster: Any,
) -> None:
    """`of_cluster`: the fields of SlurmOptions, which the options of the verb are named after."""
    required = _required(variables)
    assigned = [one for one in variables if "=" in one]
    flags = [*flags, *variable_flags(assigned, env_files, os.environ)]
    session = start_session(console, options, flags=flags, dry_run=True)
    chosen = renderer.SlurmOptions(**of_cluster, required=required)
    config = session.settings
    env = {name: value for name, value in config.job.env.items() if name not in required}
    config = msgspec.structs.replace(config, job=msgspec.structs.replace(config.job, env=env))
    found = _find(session, Script(script, tuple(args), module))
    text = renderer.render(config, found, chosen)
    if output is None:
        console.print(text.removesuffix("\n"))
        return
    _write(Path(output), text, private=bool(env))
    console.print(f"wrote {one_line(output)}")
    console.log(f"next: {one_line(_submission(session.root, Path(output)))}")


def _submission(root: Path, script: Path) -> str:
    """Return the command that submits the script in the project's folder."""
    if resolved(root) == resolved(Path.cwd()):
        return shlex.join(["sbatch", str(script)])
    return (
        f"cd {shlex.quote(str(root))} && "
        f"{shlex.join(['sbatch', os.path.relpath(resolved(script), resolved(root))])}"
    )


def _required(variables: Sequence[str]) -> tuple[str, ...]:
    """Return the variables whose values the script takes from where it is submitted. Raises UsageError."""
    names = tuple(dict.fromkeys(one for one in variables if "=" not in one))
    variable_flags([f"{name}=" for name in names], (), {})  # checks the names
    for name in names:
        if name in RESERVED_ENVIRONMENT:
            raise UsageError(f"--env {name}: torchrun sets it for each rank", hint="remove it")
    return names


def _find(session: Session, script: Script) -> Script:
    """Return the script by its path in the project, in whose folder the job is submitted."""
    config = session.settings
    listed = project_files.of_config(session.root, config).manifest if script.module else ()
    found, _ = find_script(session.root, Path.cwd(), script, listed, config.job.env)
    return found


def _write(path: Path, text: str, *, private: bool) -> None:
    """Write the script; `private`: it holds values of variables, which may be secret, so that only this user
    may read it. Raises UsageError rather than replacing a file that is not such a script."""
    shown = one_line(str(path), 200)
    try:
        if path.exists():
            _check_replaceable(path, shown)
        with Folder.at(path.parent) as folder:
            folder.replace(path.name, text.encode(), 0o700 if private else 0o755)
    except OSError as error:
        raise UsageError(
            f"cannot write {shown}: {error.strerror}", hint="give another file with -o"
        ) from None


def _check_replaceable(path: Path, shown: str) -> None:
    if not path.is_file():
        raise UsageError(f"{shown} is not a regular file", hint="give another file with -o")
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if renderer.MARK.encode() not in head:
        raise UsageError(
            f"{shown} already exists and was not written by `cloudddp export slurm`; it was not changed",
            hint="choose another file, or remove it",
        )
