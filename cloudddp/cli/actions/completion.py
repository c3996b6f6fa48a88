"""`completion`: the completion script for a shell."""

from __future__ import annotations

import os
from pathlib import Path

from click.shell_completion import get_completion_class

from cloudddp.cli.console import Console
from cloudddp.cli.main import main
from cloudddp.errors import UsageError


def completion(console: Console, *, shell: str | None) -> None:
    name = shell or Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(name) if name in ("bash", "zsh", "fish") else None
    if found is None:
        what = f"no completion for the shell {name!r}" if name else "SHELL is not set"
        raise UsageError(what, hint="name one of these: `cloudddp completion bash`, zsh or fish")
    console.print(found(main, {}, "cloudddp", "_CLOUDDDP_COMPLETE").source())
