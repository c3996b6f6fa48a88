"""Why the packages of [setup] environment were not installed, from what pip or uv wrote, and what to do."""

from __future__ import annotations

import re
import shlex

from cloudddp.agent.protocol.start import SetupReply
from cloudddp.config.package_inputs import PackageInputs
from cloudddp.config.packages import NO_PIP, download, takes_wheels
from cloudddp.config.spec import SetupSpec
from cloudddp.errors import NodeError
from cloudddp.text import one_line

_NO_INDEX = re.compile(
    r"simulated node: there is no package index|name resolution|NewConnectionError|Network is unreachable|"
    r"ConnectTimeout|dns error|error sending request|Temporary failure resolving"
)
_KEPT = re.compile(r"The user requested \(constraint\) torch==(\S+)")
_WANTED = re.compile(r"(\S{1,80} \S{1,40} depends on torch\b.*|The user requested torch\b.*)")
_PYTHON = re.compile(
    r"resolved to Python (\S+), which is incompatible with the project's Python requirement: `([^`]+)`|"
    r"requires a different Python: (\S+) not in '([^']+)'"
)
_MISSING = re.compile(r"No matching distribution found for ([^\n(]+)| and you require (.+?), we can")
_BUILD = re.compile(r"did not run successfully|Failed (?:to build|building)")
_BUILT = re.compile(r"(?:Processing|Obtaining(?: file://\S+/project)?|Failed to build) [./`']*([\w./-]+)")
_ERROR = re.compile(r"^\s*(\w+Error\b.*|error: command .*)", re.MULTILINE)
_NO_PIP = re.compile(
    r"(pip3?|python|uv): (command )?not found|externally-managed-environment|No module named '?pip"
    r"|ensurepip is not\s+available"
)


def error(node: int, reply: SetupReply, setup: SetupSpec, inputs: PackageInputs) -> NodeError:
    """Return the error for a command that has not installed `setup.environment`."""
    why, hint = ("", _read_only(reply)) if reply.read_only else _reason(reply.output, setup, inputs)
    return NodeError(
        f"node {node}: the packages of {setup.environment} were not installed "
        f"(exit code {reply.exit_code}){': ' if why else ''}{one_line(why, 300)}",
        hint=hint or f"correct {setup.environment} or [setup], and repeat the command",
    )


def _reason(text: str, setup: SetupSpec, inputs: PackageInputs) -> tuple[str, str]:
    """Return the reason, and what to do; '' for what is not known."""
    no_pip, wheels = NO_PIP in text, setup.wheels
    other = "choose an image with it (--image, or [job] container)"
    if found := _KEPT.search(text):
        wanted = f"{one[1]}, and " if (one := _WANTED.search(text)) else ""
        return (
            f"{wanted}torch {found[1]} of the image is kept",
            f"name the version of torch in {setup.environment}, which then replaces it, or {other}",
        )
    if found := _PYTHON.search(text):
        here, wanted = found[1] or found[3], found[2] or found[4]
        return f"they need Python {wanted}, and the nodes have {here}", f"change requires-python, or {other}"
    if not wheels and (no_pip or _NO_INDEX.search(text)) and takes_wheels(setup.environment or ""):
        fills = f"on this computer `{download(setup, inputs)}`, and in cloudddp.toml [setup] "
        return NO_PIP if no_pip else "nodes reach no package index", f'{fills}wheels = "wheels"'
    if (found := _MISSING.search(text)) or no_pip:
        name = one_line((found[1] or found[2]).strip(), 200) if found else "pip"
        if not wheels:
            return f"no {name} was found", ""
        adds = f"`pip download -d {shlex.quote(wheels)} {shlex.quote(name)}` adds it"
        return f"{wheels} has no {name} for the Python and platform of the nodes", adds
    if _BUILD.search(text):
        name = one_line((_BUILT.findall(text) or ["a package"])[-1], 200)
        why = ": ".join((f"{name} does not build", *_ERROR.findall(text)[-1:]))
        return why, f"correct {name}, and repeat the command"
    return "", ""


def hint_of_command(reply: SetupReply) -> str:
    """Return what to do about a command of [setup] run that failed."""
    if reply.read_only:
        return _read_only(reply)
    if _NO_PIP.search(reply.output):
        return 'list the packages in requirements.txt: [setup] environment = "requirements.txt" installs them'
    return "fix it in [setup] of cloudddp.toml and repeat the command"


def _read_only(reply: SetupReply) -> str:
    folder = one_line(shlex.quote(reply.read_only))
    return (
        f'the login user may not write to {folder}: put "sudo chown -R $USER {folder}" first in [setup] run'
    )
