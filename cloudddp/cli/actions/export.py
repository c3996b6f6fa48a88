"""`export`: the job as a script for another launcher. Calls nothing: neither AWS nor a node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.config.checks import RESERVED_ENVIRONMENT
from cloudddp.config.command_line import variable_flags
from cloudddp.errors import UsageError, q
from cloudddp.files import Folder, resolved
from cloudddp.job import project_files
from cloudddp.job import slurm as renderer
from cloudddp.job.job_request import Script, find_script
from cloudddp.text import one_line


def slurm(
    console: Console, *, module: bool, output: str | None, script: str, args: Sequence[str], **of_cluster: Any
) -> None:
    """`of_cluster`: the fields of SlurmOptions, which the options of the verb are named after."""
    variables = console.options.variables
    required = _required(variables)
    session = start_session(
        console, variables=[variable for variable in variables if "=" in variable], dry_run=True
    )
    chosen = renderer.SlurmOptions(**of_cluster, required=required)
    config = session.settings
    env = {name: value for name, value in config.job.env.items() if name not in required}
    config = replace(config, job=replace(config.job, env=env))
    # By its path in the project, in whose folder the job is submitted.
    listed = project_files.of_config(session.root, config).manifest if module else ()
    wanted = Script(script, tuple(args), module)
    found, _ = find_script(session.root, Path.cwd(), wanted, listed, session.settings.job.env)
    text = renderer.render(config, found, chosen)
    if output is None:
        console.print(text.removesuffix("\n"))
        return
    _write(Path(output), text, private=bool(env))
    console.print(f"wrote {one_line(output)}")
    root, submit = resolved(session.root), f"sbatch {q(Path(output))}"  # in the project's folder
    if root != resolved(Path.cwd()):
        submit = f"cd {q(session.root)} && sbatch {q(os.path.relpath(resolved(Path(output)), root))}"
    console.log(f"next: {one_line(submit)}")


def _required(variables: Sequence[str]) -> tuple[str, ...]:
    """Return the variables whose values the script takes from where it is submitted. Raises UsageError."""
    names = tuple(dict.fromkeys(variable for variable in variables if "=" not in variable))
    variable_flags([f"{name}=" for name in names], (), {})  # checks the names
    for name in names:
        if name in RESERVED_ENVIRONMENT:
            raise UsageError(f"--env {name}: torchrun sets it for each rank", hint="remove it")
    return names


def _write(path: Path, script: str, *, private: bool) -> None:
    """Write the script; `private`: it holds values of variables, which may be secret, so that only this user
    may read it. Raises UsageError rather than replacing a file that is not such a script."""
    shown = one_line(str(path), 200)
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{shown} is not a regular file", hint="give another file with -o")
        if path.exists():
            with path.open("rb") as file:
                head = file.read(1 << 16)
            if renderer.MARK.encode() not in head:
                raise UsageError(
                    f"{shown} already exists and was not written by `cloudddp export slurm`; it was not "
                    "changed",
                    hint="choose another file, or remove it",
                )
        with Folder.at(path.parent) as folder:
            folder.replace(path.name, script.encode(), 0o700 if private else 0o755)
    except OSError as error:
        text = f"cannot write {shown}: {error.strerror}"
        raise UsageError(text, hint="give another file with -o") from None
