"""The table of all settings: their types, their limits in words and their help. Pure.

One table of fields serves the file, the environment, the flags, the error messages and the generated
reference.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.spec import DataSpec, JobSpec, SetupSpec, SharedSpec, SyncSpec

SECTIONS: dict[str, type[Any]] = {
    "cluster": ClusterSpec,
    "job": JobSpec,
    "sync": SyncSpec,
    "setup": SetupSpec,
    "data": DataSpec,
    "shared": SharedSpec,
}
LISTS = ("data", "shared")  # sections that a file may have several times: [[data]]


@functools.cache
def fields(section: str) -> Mapping[str, Any]:
    """Return {key: annotated type} of a section, in the order of the reference."""
    return get_type_hints(SECTIONS[section], include_extras=True)


def unwrap(hint: Any) -> tuple[Any, list[Meta]]:
    """Return (the type without None, its limits)."""
    inner, metas = hint, []
    while True:
        metas += [m for m in getattr(inner, "__metadata__", ()) if isinstance(m, Meta)]
        rest = [k for k in get_args(inner) if k is not type(None)]
        if hasattr(inner, "__metadata__") or (type(None) in get_args(inner) and len(rest) == 1):
            inner = rest[0] if not hasattr(inner, "__metadata__") else inner.__origin__
        else:
            return inner, metas


def allowed(hint: Any) -> str:
    """Return which values a field accepts, in words."""
    inner, metas = unwrap(hint)
    for meta in metas:
        if meta.extra and "allowed" in meta.extra:
            return str(meta.extra["allowed"])
    limits = next((m for m in metas if m.ge is not None or m.gt is not None), None)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(map(str, get_args(inner)))
    if get_origin(inner) is tuple:
        return f"a list in brackets, each {allowed(get_args(inner)[0])}"
    if get_origin(inner) is dict:
        return "a table of NAME = 'value'"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return words[inner] + (_bounds(limits) if limits else "")


def _bounds(meta: Meta) -> str:
    if meta.gt is not None:
        return f" above {number(meta.gt)}" + (
            f" and at most {number(meta.le)}" if meta.le is not None else ""
        )
    return f" from {number(meta.ge or 0)}" + (f" to {number(meta.le)}" if meta.le is not None else " up")


def number(value: float) -> str:
    """Return a number without an exponent: 10000000, not 1e+07."""
    return str(int(value)) if value == int(value) else repr(float(value))


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "did you mean 'x'?" with the most similar known names, or the list of all known names."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    if not close:
        return "known: " + ", ".join(sorted(known))
    return "did you mean " + " or ".join(repr(name) for name in close) + "?"


def example_name(folder: Path) -> str:
    """Return a cluster name made from a project folder's name."""
    word = re.sub(r"[^a-z0-9-]+", "-", Path(os.path.normpath(folder.absolute())).name.lower()).strip("-")[:40]
    return word or "default"


def toml_value(value: Any) -> str:
    """Return a default in TOML syntax, which is that of JSON for all of them."""
    return json.dumps(value)
