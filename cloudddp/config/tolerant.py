"""Settings for the verbs that stop the bill or only look, where the configuration is broken: what can be used
of it.

The name of the cluster has to be certain: without the broken part, another cluster of the user may be meant.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloudddp.config import settings
from cloudddp.config.schema import LISTS, SECTIONS
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError

_MOST_PARSED = 100  # beginnings of a file that are tried
_KEPT = ("name", "region", "regions")  # where settings contradict each other
Report = Callable[[UsageError], None]


@dataclass(frozen=True, slots=True)
class _Source:
    """`doubt`: the error of a part that cannot be used, and that may name the cluster."""

    layer: Layer
    doubt: UsageError | None = None

    @property
    def name(self) -> str | None:
        return self.layer.values.get("cluster", {}).get("name")


def resolve(
    given: Sequence[Layer],
    environ: Mapping[str, str],
    files: Sequence[Path],
    report: Report,
    *,
    named: bool,
    default: Layer,
) -> Config:
    """Return the settings that can be used, of layers that are valid, the environment and files, by
    precedence, and `default`. `report` is called with each error. With `named`, raises one that may be about
    the name of the cluster, if nothing above it gives the name.
    """
    sources = [_Source(layer) for layer in given]
    sources += [_of_variable(name, value, report) for name, value in environ.items()]
    sources += [*(_of_file(path, report) for path in files), _Source(default)]
    for source in sources:
        if source.name is not None or not named:
            break
        if source.doubt is not None:
            raise source.doubt
    layers = [source.layer for source in sources]
    try:
        return settings.resolve(layers)
    except UsageError as error:
        report(error)
        kept = ({k: v for k, v in one.values.get("cluster", {}).items() if k in _KEPT} for one in layers)
        return settings.resolve(
            [replace(one, values={"cluster": values}) for one, values in zip(layers, kept, strict=True)]
        )


def _of_variable(name: str, value: str, report: Report) -> _Source:
    try:
        layers = settings.environment_layers({name: value})
    except UsageError as error:
        report(error)
        variable = settings.variable_of("cluster", "name")
        near = name.endswith("NAME") or difflib.get_close_matches(name, [variable], cutoff=0.8)
        return _Source(Layer(name, {}), error if near else None)
    return _usable(layers[0], report) if layers else _Source(Layer(name, {}))


def _of_file(path: Path, report: Report) -> _Source:
    try:
        return _usable(settings.read_toml(path), report)
    except UsageError as error:
        report(error)
        known = _usable(Layer(str(path), _beginning(path)), lambda _: None)
        return replace(known, doubt=error)


def _beginning(path: Path) -> dict[str, Any]:
    """Return what a file sets up to the line that is not valid TOML: nothing below can set it to something
    else."""
    try:
        lines = settings.read(path).split(b"\n")
    except (OSError, UsageError):
        return {}
    end = len(lines)
    for _ in range(_MOST_PARSED):
        try:
            return tomllib.loads(b"\n".join(lines[:end]).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            end = error.object.count(b"\n", 0, error.start)
        except (ValueError, RecursionError) as error:
            found = re.search(r"\(at line (\d{1,9}),", str(error))
            end = min(end, int(found[1]) if found else end) - 1
    return {}


def _usable(layer: Layer, report: Report) -> _Source:
    values: dict[str, dict[str, Any]] = {}
    doubt = None
    for section, content in layer.values.items():
        if section in LISTS:
            continue  # for jobs only
        for key, value in content.items() if isinstance(content, dict) else [(section, content)]:
            try:
                if section not in SECTIONS or not isinstance(content, dict):
                    settings.unknown_section(layer.origin, section)
                settings.check_value(layer, section, key, value)
                values.setdefault(section, {})[key] = value
            except UsageError as error:
                report(error)
                doubt = error if _may_name(key, value) else doubt
    return _Source(replace(layer, values=values), doubt)


def _may_name(key: str, value: object) -> bool:
    """Return whether a part that is not understood may name the cluster: by its key, or by one inside it."""
    if isinstance(value, dict):
        return any(_may_name(*inner) for inner in value.items())
    word = key.lower()
    return "name" in word or bool(difflib.get_close_matches(word, ["name", "cluster"], cutoff=0.7))
