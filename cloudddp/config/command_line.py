"""What was given on the command line, as plain data: the options of every command (`GlobalOptions`), options
that stand for a setting (`Flag`), and variables of the ranks, which may come from this computer's environment
and from files of NAME=VALUE lines. Standard library only: `--help` imports it.

Values of variables may be secret: no message contains one, and of a line that is not understood nothing is
shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp.errors import UsageError
from cloudddp.text import one_line

# They need no cluster, so the options that choose one would only make a suggested command longer.
WITHOUT_OPTIONS = ("init", "sim")


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The global options as given, before the verb or after it; None and False: not given."""

    cluster: str | None = None
    config: str | None = None
    region: str | None = None
    profile: str | None = None
    sim: bool = False
    verbose: bool = False
    timings: bool = False

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
            "--region": self.region,
            "--profile": self.profile,
        }
        named = self._named(words, chosen)
        given = ["--sim"] if self.sim else []
        for option, value in chosen.items():
            given += [option, value] if value and option not in named else []
        return shlex.join([program, *given, *words])

    @staticmethod
    def _named(words: Sequence[str], options: Container[str]) -> Sequence[str]:
        """Return those of the options that a command itself names, right after the verb: not those of a
        script."""
        at = 1
        while at < len(words) and words[at] in options:
            at += 2
        return words[1:at:2]


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
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")  # what may follow a quoted value


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
        _check_text(name, value)
        found.append(Flag("--env", "job", "env", {name: value}))
    return found


def _check_text(name: str, value: str) -> None:
    """Raise UsageError for a value that is not UTF-8: the request to the nodes is."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"--env {name}: its value is not UTF-8",
            hint="encode it, for example with base64, and decode it in the script",
        ) from None


def read_env_file(name: str) -> dict[str, str]:
    """Return the variables of a file; a pipe, as the shell makes it for `<(command)`, is read to its end.
    Raises UsageError."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ENV_FILE + 1)
    except OSError as error:
        raise UsageError(f"--env-file {name}: {error.strerror}", hint="give the path of a file") from None
    except ValueError:  # a NUL in the path
        raise UsageError(f"--env-file {name!r} is not a path", hint="give the path of a file") from None
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
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        if not line.strip() or line.lstrip().startswith("#"):
            at = end + 1
            continue
        name = _name(line, _where(text, at, origin))
        value, at = _value(text, at + line.index("=") + 1, end, _where(text, at, origin))
        found[name] = value
    return found


def _where(text: str, at: int, origin: str) -> str:
    return f"{origin}, line {text.count(chr(10), 0, at) + 1}"


def _name(line: str, where: str) -> str:
    before, equals, _ = line.partition("=")
    if not equals:
        raise UsageError(f"{where}: no '='", hint="write NAME=VALUE; a value with several lines needs quotes")
    name = re.sub(r"\Aexport[ \t]+", "", before.strip())
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: what is before '=' is not the name of a variable", hint=_NAME_HINT)
    return name


def _value(text: str, start: int, end: int, where: str) -> tuple[str, int]:
    """Return the value that begins at `start`, in a line that ends at `end`, and where the next line
    begins."""
    rest = text[start:end]
    first = start + len(rest) - len(rest.lstrip(" \t"))
    quote = text[first : first + 1]
    if quote not in ("'", '"'):
        value, after = re.split(r"(?<=[ \t])#", rest)[0].strip(), end + 1
    else:
        value, closed = _quoted(text, first, where)
        follows = _REST.match(text, closed)
        if follows is None:
            raise UsageError(f"{where}: text follows the closing quote", hint="quote the whole value")
        after = follows.end()
    if "\0" in value:
        raise UsageError(f"{where}: the value contains a NUL character", hint="remove it")
    return value, after


def _quoted(text: str, first: int, where: str) -> tuple[str, int]:
    if text[first] == "'":
        close = text.find("'", first + 1)
        if close >= 0:
            return text[first + 1 : close], close + 1
    elif found := _DOUBLE_QUOTED.match(text, first):
        return re.sub(r"\\(.)", _unescaped, found[1], flags=re.DOTALL), found.end()
    raise UsageError(f"{where}: the quote is not closed", hint=f"end the value with {text[first]}")


def _unescaped(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[0])
