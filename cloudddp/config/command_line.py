"""What was given on the command line, as plain data: the options of every command (`GlobalOptions`), options
that stand for a setting (`Flag`), and variables of the ranks, which may come from this computer's environment
and from files of NAME=VALUE lines. Standard library only: `--help` imports it.

Values of variables may be secret: no message contains one, and of a line that is not understood nothing is
shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp.errors import UsageError
from cloudddp.text import one_line, reason_of

# They need no cluster, so the options that choose one would only make a suggested command longer.
WITHOUT_OPTIONS = ("init", "sim")


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The options as given that every verb has, before it or after it, and those below that several verbs
    share; None, False and (): not given. `flags`: the settings among them."""

    cluster: str | None = None
    config: str | None = None
    region: str | None = None
    profile: str | None = None
    sim: bool = False
    verbose: bool = False
    timings: bool = False
    anyone: bool = False
    yes: bool = False
    variables: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()

    def command_line(self, words: Sequence[str]) -> str:
        """Return a command as this user has to type it: with the options that choose the cluster.

        An option that the command itself names is not repeated. A command of another program acts on this
        run's account: it gets the profile, or with --sim the simulator's environment; its region, if it needs
        one, is in the command. One that only sets up credentials is complete.
        """
        program, *words = words
        if program == "aws" and words[0] in ("configure", "login", "sso"):
            return shlex.join([program, *words])
        if program != "cloudddp":
            if self.sim:
                return shlex.join(["cloudddp", "sim", "exec", "--", program, *words])
            profile = self.profile if program == "aws" and "--profile" not in words else None
            return shlex.join([program, *words, *(["--profile", profile] if profile else [])])
        if words[0] in WITHOUT_OPTIONS or words[0].startswith("-"):
            return shlex.join([program, *words])
        chosen = {
            "-c": self.cluster,
            "--config": self.config,
            "--region": None if words[0] == "ls" else self.region,  # which would not list all
            "--profile": self.profile,
        }
        at = 1  # what the command itself names, right after the verb, and not among the words of a script
        while at < len(words) and words[at] in chosen:
            at += 2
        given = ["--sim"] if self.sim else []
        for option, value in chosen.items():
            given += [option, value] if value and option not in words[1:at:2] else []
        return shlex.join([program, *given, *words])


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting given as an option: `Flag("--nodes", "cluster", "nodes", "4")`. The value is not validated
    yet."""

    option: str
    section: str
    key: str
    value: Any


MAX_ENV_FILE = 1 << 20  # bytes of one file
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME_HINT = "allowed: letters, digits and '_', not starting with a digit"
_QUOTED = re.compile(r"""[ \t]*(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*+)")""", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}
_REST = re.compile(r"[^\S\n]*(?:#[^\n]*)?(?:\n|\Z)")  # an empty line; what may follow a quoted value


def variable_flags(variables: Sequence[str], files: Sequence[str], environ: Mapping[str, str]) -> list[Flag]:
    """Return `-e NAME=VALUE`, `-e NAME` (from `environ`) and `--env-file FILE` as settings; `-e` overrides
    files.

    Raises UsageError for a name that is not one or is not set, and for a file that is not as
    `parse_env_file` describes.
    """
    found = [Flag("--env-file", "job", "env", read_env_file(name)) for name in files]
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--env {one_line(repr(name), 80)} is not the name of a variable", hint=_NAME_HINT
            )
        if not equals:
            if name not in environ:
                raise UsageError(
                    f"--env {name}: this variable is not set here",
                    hint=f"export it first, or give the value: --env {name}=VALUE",
                )
            value = environ[name]
        found.append(Flag("--env", "job", "env", {name: value}))
    return found


def read_env_file(name: str) -> dict[str, str]:
    """Return the variables of a file; a pipe, as the shell makes it for `<(command)`, is read to its end.
    Raises UsageError."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ENV_FILE + 1)
    except (OSError, ValueError) as error:  # the latter: a NUL in the path
        what = f"--env-file {one_line(name)}: {reason_of(error)}"
        raise UsageError(what, hint="give the path of a file") from None
    if len(data) > MAX_ENV_FILE:
        raise UsageError(
            f"--env-file {name} is larger than {MAX_ENV_FILE >> 20} MiB",
            hint="give a file of NAME=VALUE lines",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"--env-file {name}, line {number}: not UTF-8", hint="save it as UTF-8") from None
    return parse_env_file(text, f"--env-file {name}")


def parse_env_file(text: str, origin: str) -> dict[str, str]:
    r"""Return the variables of a file in the syntax of dotenv. Raises UsageError with the number of the line.

    `export ` before a name, empty lines and lines that begin with `#` are ignored. 'single quotes' keep
    everything as it is; in "double quotes" \n, \r, \t, \", \\ and \$ are escapes; both may span lines.
    Without quotes a value ends before ` #`. Nothing is expanded: `$NAME` stays as it is.
    """
    text = text.replace("\r\n", "\n")
    found: dict[str, str] = {}
    at = 0

    def refused(what: str, hint: str) -> UsageError:
        return UsageError(f"{origin}, line {text.count(chr(10), 0, at) + 1}: {what}", hint=hint)

    while at < len(text):
        if empty := _REST.match(text, at):
            at = empty.end()
            continue
        line = text[at : text.find("\n", at) % (len(text) + 1)]  # to the end of the text, without a line feed
        before, equals, plain = line.partition("=")
        name = re.sub(r"\Aexport[ \t]+", "", before.strip())
        if not equals:
            raise refused("no '='", "write NAME=VALUE; a value with several lines needs quotes")
        if not _NAME.fullmatch(name):
            raise refused("what is before '=' is not the name of a variable", _NAME_HINT)
        end = at + len(line) + 1
        if quoted := _QUOTED.match(text, at + len(before) + 1):
            escaped, value = quoted["double"], quoted["single"] or ""
            if escaped is not None:
                value = re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[1], one[0]), escaped, flags=re.DOTALL)
            if (rest := _REST.match(text, quoted.end())) is None:
                raise refused("text follows the closing quote", "quote the whole value")
            end = rest.end()
        elif (quote := plain.lstrip(" \t")[:1]) in ("'", '"'):
            raise refused("the quote is not closed", f"end the value with {quote}")
        else:
            value = re.split(r"(?<=[ \t])#", plain)[0].strip()
        if "\0" in value:
            raise refused("the value contains a NUL character", "remove it")
        found[name] = value
        at = end
    return found
