"""What no peer sends, generated: for each record type of the protocol, messages of which one value is of
another type, beyond the limits of its field, or absent."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cloudddp.agent import protocol
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.sending import Sender

# The first that the limits of a field allow is its example; each that they do not allow is wrong.
_TEXTS = (
    "20260101-000000-abcd",
    "x",
    "",
    "..",
    "../x",
    "/x",
    "a\n",
    "a\x1b[2J",
    "--help",
    "\u0663",
    "x" * 70_000,
)
_NUMBERS = (1, 1024, 0, -1, -(1 << 62), 1 << 62, 10**20, 10**4000)
_LENGTHS = (1, 0, 300, 5000)
_EXAMPLES: dict[Any, Any] = {"secret": "0" * 64, "interface": "lo", Entry: ["f", 0o644, 1, 1, ""]}
_TYPES: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,)}


def kinds() -> list[Any]:
    """Return the record types of all modules of the protocol; those without fields have no wrong value."""
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}.")
    ]
    found = [
        kind
        for module in modules
        for kind in vars(module).values()
        if is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    plain = [kind for kind in found if bytes not in map(_bare, _hints(kind).values())]
    return [kind for kind in plain if fields(kind) and kind is not Sender]


def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def unlimited(hint: Any, name: str = "") -> Iterator[str]:
    """Yield the fields (KIND.FIELD) of a record, and of those in it, that hold a text, a number or several
    values without a limit of their type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        hint, has_limit = arguments[0], True
        origin, arguments = get_origin(hint), get_args(hint)
    else:
        has_limit = False
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple)):
        for field, one in _hints(hint).items():
            yield from unlimited(one, f"{hint.__name__}.{field}")
        return
    if not has_limit and (origin in (tuple, dict) or hint in (str, int, float)):
        yield name
    for one in arguments if origin in (tuple, dict, Union) else ():
        yield from unlimited(one, name)


def example(hint: Any) -> Any:
    """Return JSON that fits a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _EXAMPLES:
        return _EXAMPLES[hint]
    if origin is Annotated:
        values: Iterator[Any] = _of_limits(arguments[0], example(arguments[0]))
        return next(value for value in values if _allows(hint, value))
    if origin is Union:
        return example(arguments[0])
    if origin is tuple:
        return [example(arguments[0])]
    if origin is dict:
        return {"1" if _bare(arguments[0]) is int else "x": example(arguments[1])}
    if is_dataclass(hint):
        return {name: _EXAMPLES.get(name) or example(one) for name, one in _hints(hint).items()}
    if issubclass(hint, Enum):
        return next((one.value for one in hint if one.value == "failed"), next(iter(hint)).value)
    if issubclass(hint, tuple):
        return [example(one) for one in _hints(hint).values()]
    return {str: _TEXTS[0], bool: True}.get(hint, 1)


def wrong(hint: Any, *, inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield JSON that does not fit a type, and in which way: for a record `inside` another one, one value of
    each field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from wrong(arguments[0], inside=inside)
        yield from (("limit", value) for value in _of_limits(arguments[0], []) if not _allows(hint, value))
    elif origin is Union:
        yield from ((why, value) for why, value in wrong(arguments[0], inside=inside) if value is not None)
    elif origin is tuple:
        yield from _of_other_types(list)
        yield from ((why, [value]) for why, value in wrong(arguments[0], inside=inside))
    elif origin is dict:
        yield from _of_other_types(dict)
        yield from ((why, {"1": value}) for why, value in wrong(arguments[1], inside=inside))
        key = arguments[0]
        names = ["x", *_NUMBERS] if _bare(key) is int else []
        yield from (
            ("key", {str(name): example(arguments[1])})
            for name in names
            if name == "x" or not _allows(key, name)
        )
    elif is_dataclass(hint):
        yield from _of_other_types(dict)
        whole = example(hint)
        for field in fields(hint):
            for why, value in islice(wrong(_hints(hint)[field.name], inside=True), 1 if inside else None):
                yield f"{field.name}: {why}", {**whole, field.name: value}
            if field.default is MISSING and field.default_factory is MISSING:
                yield (
                    f"{field.name}: absent",
                    {name: one for name, one in whole.items() if name != field.name},
                )
    elif issubclass(hint, Enum):
        yield from (("no member", value) for value in (None, 1, [], "happy", ["failed"]))
    elif issubclass(hint, tuple):
        yield from _of_other_types(list)
        yield from (("length", value) for value in ([], [*example(hint), 1]))
    else:
        yield from _of_other_types(*_TYPES[hint])
        if float in _TYPES[hint]:
            yield from (("not finite", value) for value in (float("nan"), float("inf"), float("-inf")))


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _of_other_types(*right: type) -> Iterator[tuple[str, Any]]:
    values: tuple[Any, ...] = (None, True, 7, 1.5, "7", [], {}, [7])
    return (("type", value) for value in values if type(value) not in right)


def _of_limits(bare: Any, fits: Any) -> Iterator[Any]:
    if get_origin(bare) is tuple:
        return ((fits or [0]) * count for count in _LENGTHS)
    if get_origin(bare) is dict:
        return iter([fits]) if fits else iter(())
    return iter(_TEXTS if bare is str else _NUMBERS)


def _allows(hint: Any, value: Any) -> bool:
    try:
        for check in getattr(hint, "__metadata__", ()):
            check("", value)
    except (ProtocolError, TypeError):  # TypeError: a limit of another type
        return False
    return True
