"""A message on the wire: JSON <-> frozen dataclasses, driven by their type hints, which have the limits of
the fields, too; and what goes before each request and after each output where one channel carries several
steps. Standard library only.

The agent uses `decode` for requests and for its own files. The laptop does not use it for replies:
`json.loads` builds every list and dict that a hostile node sends before anything is checked, which for 16 MB
of `[[],[],...]` takes 400 MB. cloudddp/agent/replies.py decodes the same dataclasses without that.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from typing import Annotated, Any, Callable, NoReturn, TypeVar, Union, get_origin, get_type_hints

T = TypeVar("T")

MAX_REQUEST = 64 << 20  # bytes of one request: a manifest of 100,000 files takes 12 MB
MAX_REPLY = 4 << 20  # bytes of one reply
MAX_COUNT = 1 << 53  # the largest integer range that a float represents exactly
MAX_SIZE = 1 << 62  # bytes, nanoseconds
MAX_TIME = 1e11  # seconds since the epoch: the year 5138
MAX_PATH = 4096  # bytes (Linux: PATH_MAX)
MAX_TEXT = 1 << 16  # characters of output or of a command

MAX_JOB_ID = 64  # characters
MAX_NAME = 255
MAX_REASON = 500  # characters of why a result was left out
MAX_ORIGIN = 64
MIXED = "mixed"  # as an origin: another project's files are being replaced, or that was interrupted


class ProtocolError(ValueError):
    """A message that does not fit the protocol. The text says what was wrong with it, for a person."""


Check = Callable[[str, Any], None]  # gets the name of a field and its value; raises ProtocolError


def within(low: float, high: float) -> Check:
    """Return the limits of a number, for its type: `Annotated[int, within(0, 9)]`."""

    def check(name: str, value: float) -> None:
        if not low <= value <= high:  # also false for nan
            raise ProtocolError(f"{name} is out of range")

    return check


def at_most(limit: int, *, least: int = 0) -> Check:
    """Return the limits of the length of a text, a tuple or a dict, for its type."""

    def check(name: str, value: Any) -> None:
        if not least <= len(value) <= limit:
            raise ProtocolError(f"{name} is too {'short' if len(value) < least else 'long'}")

    return check


def is_plain(text: str, others: str) -> bool:
    """Return whether a text has ASCII letters and digits, and besides them only the characters `others`.
    (Compiling a regular expression takes longer.)"""
    for character in others:
        text = text.replace(character, "")
    return text.isascii() and text.isalnum()


def has_job_id_format(text: str) -> bool:
    """Return whether a text is an id as `launch` makes them: 20260131-235959-beef."""
    day, _, rest = text.partition("-")
    second, _, random = rest.partition("-")
    return (
        text.isascii()
        and (len(day), len(second), len(random)) == (8, 6, 4)
        and (day + second).isdigit()
        and random.isalnum()
    )


def is_job_id(text: str) -> bool:
    return 0 < len(text) <= MAX_JOB_ID and not text.startswith("-") and is_plain(text, "-")


def check_job_id(name: str, text: str) -> None:
    """Raise ProtocolError unless the text is a job id: it becomes a part of paths, here and on the nodes."""
    if not is_job_id(text):
        raise ProtocolError(f"{name} is not a job id: {text[:80]!r}")


def _check_optional_job_id(name: str, text: str) -> None:
    if text:
        check_job_id(name, text)


def check_project(name: str, text: str) -> None:
    """Raise ProtocolError unless the text is the plain name of a folder: it is one below the home folder."""
    if len(text) > MAX_NAME or not is_plain(text, "-_."):
        raise ProtocolError(f"{name} is not the name of a project: {text[:80]!r}")


def _check_no_nul(name: str, text: str) -> None:
    if "\0" in text:
        raise ProtocolError(f"{name} contains a NUL")


def check_origin(name: str, text: str) -> None:
    """Raise ProtocolError for what is not the id of a laptop's project; '' is none."""
    if text and (len(text) > MAX_ORIGIN or not is_plain(text, "")):
        raise ProtocolError(f"{name} is not the id of a project")


# Types of fields with their limits, which `frozen` enforces.
Count = Annotated[int, within(0, MAX_COUNT)]
Number = Annotated[int, within(-MAX_COUNT, MAX_COUNT)]
Size = Annotated[int, within(0, MAX_SIZE)]
Time = Annotated[float, within(0, MAX_TIME)]
Port = Annotated[int, within(1, (1 << 16) - 1)]
ExitStatus = Annotated[int, within(0, 255)]
SignalNumber = Annotated[int, within(1, 64)]
Text = Annotated[str, at_most(MAX_TEXT)]
ShortText = Annotated[str, at_most(64)]
PathText = Annotated[str, at_most(MAX_PATH), _check_no_nul]
JobId = Annotated[str, check_job_id]
OptionalJobId = Annotated[str, _check_optional_job_id]  # '' for none
ProjectName = Annotated[str, check_project]
OriginId = Annotated[str, check_origin]


@cache
def limits(kind: Any) -> list[tuple[str, Check]]:
    """Return what checks the fields of a dataclass, with their names."""
    return [(name, check) for name, hint in _type_hints(kind).items() for check in _checks_of(hint)]


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _checks_of(hint: Any) -> list[Check]:
    """Return what checks a value, and the values in it, against the limits in its type."""
    origin = get_origin(hint)
    if origin is Annotated:
        return [*hint.__metadata__, *_checks_of(hint.__origin__)]
    if origin not in (Union, tuple, dict):
        return []
    first, second = map(_checks_of, hint.__args__)  # of Optional[X], tuple[X, ...] or dict[K, V]

    def check(name: str, value: Any) -> None:
        for one in first if value is not None else ():
            for part in (value,) if origin is Union else value:
                one(name, part)
        for one in second:
            for part in value.values():
                one(name, part)

    return [check] if first or second else []


def encode(message: Any) -> bytes:
    """Return a message as one line of JSON in ASCII, without the line break. Unpaired surrogates survive."""
    return json.dumps(message, default=_plain).encode("ascii")


def encode_utf8(message: Any) -> bytes:
    """Return a message as one line of JSON in UTF-8. Text that is not valid Unicode (the byte of a file name
    in an error) becomes `?`, because the laptop's decoder refuses it."""
    return json.dumps(message, default=_plain, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return value.__dict__
    raise TypeError(f"not a message: {type(value).__name__}")


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REQUEST) -> T:
    """Return the dataclass, or the dict of such, of type `kind` that the JSON describes. Unknown keys are
    ignored. Raises ProtocolError."""
    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
    try:
        hint: Any = kind
        found: T = _converter(hint)(json.loads(data, parse_constant=_refuse))
        return found
    except ProtocolError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(str(error)[:200]) from None


def _refuse(text: str) -> NoReturn:
    raise ProtocolError(f"{text} is not a number")


Converter = Callable[[Any], Any]


@cache
def _converter(hint: Any) -> Converter:
    """Return the function that checks a JSON value against a type hint and builds the value."""
    origin = getattr(hint, "__origin__", None)
    if hasattr(hint, "__metadata__"):  # Annotated: `limits` reads that
        return _converter(origin)
    if origin is Union:  # always Optional[X]
        inner = _converter(hint.__args__[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:  # always tuple[X, ...]
        inner = _converter(hint.__args__[0])
        return lambda value: tuple([inner(one) for one in _list(value)])
    if origin is dict:
        key, inner = _key(hint.__args__[0]), _converter(hint.__args__[1])
        return lambda value: {key(name): inner(one) for name, one in _object(value).items()}
    if is_dataclass(hint):
        return _record(hint)
    if issubclass(hint, tuple):
        return _named_tuple(hint)
    if issubclass(hint, Enum):
        return lambda value: hint(value)
    return _number if hint is float else _exact(hint)


def _exact(kind: type) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not kind:  # not isinstance: True is an int
            raise ProtocolError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return convert


_list, _object = _exact(list), _exact(dict)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ProtocolError(f"expected a finite number, got {type(value).__name__}")
    return float(value)


def _named_tuple(kind: Any) -> Converter:
    inner = [_converter(hint) for hint in _type_hints(kind).values()]

    def convert(value: Any) -> Any:
        if len(_list(value)) != len(inner):
            raise ProtocolError(f"expected {len(inner)} values, got {len(value)}")
        return kind(*[one(item) for one, item in zip(inner, value)])

    return convert


def _key(hint: Any) -> Converter:
    """JSON has text keys only: a number is written as `-1`."""

    def number(text: str) -> int:
        if not re.match(r"(0|-?[1-9][0-9]{0,17})\Z", text):
            raise ProtocolError(f"a key is not a number: {text[:20]!r}")
        return int(text)

    return number if getattr(hint, "__origin__", hint) is int else str  # or Annotated[int, ...]


def _record(kind: Any) -> Converter:
    hints = _type_hints(kind)
    inner = {field.name: _converter(hints[field.name]) for field in fields(kind)}
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def convert(value: Any) -> Any:
        known: dict[str, Any] = {}
        for name, one in _object(value).items():
            if name in inner:
                try:
                    known[name] = inner[name](one)
                except ValueError as error:
                    raise ProtocolError(f"{name}: {error}") from None
        missing = [name for name in required if name not in known]
        if missing:
            raise ProtocolError(f"{kind.__name__} lacks {', '.join(missing)}")
        return kind(**known)

    return convert


# Bytes of the step's name and of the request, bytes of the name alone, whether it is the last step.
STEP_HEAD = struct.Struct(">II?")
STDERR_END = b"\0"  # no step writes this byte to stderr, nor to stdout, but for the last one
_STDOUT_END = re.compile(rb"\0(\d{1,3})\n")


def ask(step: str, request: bytes, *, is_last: bool = False) -> bytes:
    """Return what asks for a step. Its body, if any, follows."""
    return STEP_HEAD.pack(len(step) + len(request), len(step), is_last) + step.encode() + request


def stdout_end(code: int) -> bytes:
    return b"\0%d\n" % code


def read_stdout_end(data: bytes) -> int:
    """Return the exit code of a step. Raises ProtocolError."""
    found = _STDOUT_END.fullmatch(data)
    if found is None:
        raise ProtocolError("its output does not end as that of a step")
    return int(found[1])
