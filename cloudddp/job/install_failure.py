"""Why the packages of [setup] environment were not installed, from what pip or uv wrote, and what to do."""

from __future__ import annotations

import re
import shlex

from cloudddp.agent.protocol.start import SetupReply
from cloudddp.config import packages
from cloudddp.config.package_inputs import PackageInputs
from cloudddp.config.spec import SetupSpec
from cloudddp.errors import NodeError
from cloudddp.text import one_line

NO_INDEX = re.compile(
    r"simulated node: there is no package index|name resolution|NewConnectionError|Network is unreachable|"
    r"ConnectTimeout|dns error|error sending request|Temporary failure resolving"
)
_KEPT = re.compile(r"The user requested \(constraint\) torch==(\S+)")
_WANTED = re.compile(r"(\S{1,80} \S{1,40} depends on torch\b.*|The user requested torch\b.*)")
_OTHER_PYTHON = (
    re.compile(
        r"resolved to Python (\S+), which is incompatible with the project's Python requirement: `([^`]+)`"
    ),
    re.compile(r"requires a different Python: (\S+) not in '([^']+)'"),
)
_MISSING = re.compile(r"No matching distribution found for ([^\n(]+)|Because .+ and you require ([^\s,]+)")
_NO_PROGRAM = re.compile(
    r"(pip3?|python|uv): (command )?not found|externally-managed-environment|No module named '?pip"
)
_BUILD = re.compile(r"did not run successfully|Failed (?:to build|building)")
_BUILT = re.compile(r"(?:Processing|Obtaining(?: file://\S+/project)?|Failed to build) [./`']*([\w./-]+)")
_ERROR = re.compile(r"^\s*(\w+Error\b.*|error: command .*)", re.MULTILINE)


def error(node: int, reply: SetupReply, setup: SetupSpec, inputs: PackageInputs) -> NodeError:
    """Return the error for a command that has not installed `setup.environment`."""
    why, hint = _reason(reply, setup, inputs)
    return NodeError(
        f"node {node}: the packages of {setup.environment} were not installed "
        f"(exit code {reply.exit_code}){': ' if why else ''}{one_line(why, 300)}",
        hint=hint,
    )


def _reason(reply: SetupReply, setup: SetupSpec, inputs: PackageInputs) -> tuple[str, str]:
    """Return the reason, '' if it is not known, and what to do."""
    listed, text, wheels = setup.environment or "", reply.output, setup.wheels
    if reply.read_only:
        return "", _read_only(reply)
    if found := _KEPT.search(text):
        wanted = _WANTED.search(text)
        return (
            f"{f'{wanted[1]}, and ' if wanted else ''}torch {found[1]} of the image is kept",
            f"name the version of torch in {listed}, which is then installed in its place, or choose another "
            "image (--image, or [job] container)",
        )
    if found := next((one for pattern in _OTHER_PYTHON if (one := pattern.search(text))), None):
        return (
            f"they need Python {found[2]}, and the nodes have {found[1]}",
            "change requires-python, or choose an image with that Python (--image, or [job] container)",
        )
    no_index = not wheels and (NO_INDEX.search(text) or packages.NO_PIP in text)
    if no_index and packages.takes_wheels(listed):
        return (
            packages.NO_PIP if packages.NO_PIP in text else "nodes reach no package index",
            f"on this computer `{packages.download(setup, inputs)}`, and in cloudddp.toml [setup] "
            'wheels = "wheels"',
        )
    found = _MISSING.search(text)
    if found or packages.NO_PIP in text:
        name = one_line((found[1] or found[2]).strip(), 200) if found else "pip"
        if not wheels:
            return f"no {name} was found", f"correct {listed} and repeat the command"
        return (
            f"{wheels} has no {name} for the Python and platform of the nodes",
            f"`pip download -d {shlex.quote(wheels)} {shlex.quote(name)}` adds it",
        )
    if _BUILD.search(text):
        name = one_line((_BUILT.findall(text) or ["a package"])[-1], 200)
        return (
            ": ".join((f"{name} does not build", *_ERROR.findall(text)[-1:])),
            f"correct {name}, and repeat the command",
        )
    return "", f"correct {listed} and repeat the command"


def hint_of_command(reply: SetupReply) -> str:
    """Return what to do about a command of [setup] run that failed."""
    if reply.read_only:
        return _read_only(reply)
    if _NO_PROGRAM.search(reply.output):
        return (
            "list the packages in requirements.txt and name it as [setup] environment: they are installed "
            "with the Python of the image as it is"
        )
    return "fix it in [setup] of cloudddp.toml and repeat the command"


def _read_only(reply: SetupReply) -> str:
    folder = one_line(shlex.quote(reply.read_only))
    return (
        f'the login user may not write to {folder}: put "sudo chown -R $USER {folder}" first in [setup] run'
    )
