"""Where settings come from: flags, environment, files; merged in layers and checked against spec.py's table.

The strongest layer wins (flag > environment > ./cloudddp.toml > user configuration > default), every layer is
checked, and each remembers its origin, so that an error names the place to mend. Nothing here calls anything.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from cloudddp.errors import UsageError
from cloudddp.spec import (
    SECTIONS,
    ClusterSpec,
    Config,
    JobSpec,
    SetupSpec,
    SyncSpec,
    allowed,
    fields,
    nearest,
    unwrap,
)
from cloudddp.text import one_line

CONFIG_NAME = "cloudddp.toml"
LONGEST = 1 << 20  # bytes of a configuration file
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the launcher or torchrun itself sets for each rank: a value of the user's would silently lose.
RESERVED_ENVIRONMENT = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
# CLOUDDDP_* variables that are not settings: the rest of the prefix is checked for misspellings.
OTHER_VARIABLES = frozenset(
    [
        "HOME",
        "CONFIG",
        "CHECKIP_URL",
        "PROFILE",
        "YES",
        "SIM",
        "SIM_HOME",
        "SIM_NODES",
        "SIM_NODE",
        "TASK",
        "JOB_ID",
        "NUM_NODES",
        "NODE_IPS",
        "NODE_RANK",
        "STATUS_FILE",
    ]
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings: what an error calls it, and {section: {key: value}}.

    `textual` says that values came as text (a flag, a variable), so that "4" may stand for 4.
    """

    origin: str
    values: Mapping[str, Mapping[str, Any]]
    textual: bool = False


def read_toml(path: Path) -> Layer:
    """Return one configuration file as a layer. Raises UsageError where it cannot be read or is not TOML."""
    try:
        values = tomllib.loads(_read(path).decode())
    except (ValueError, RecursionError) as error:  # tomllib's own, no UTF-8, thousands of digits or brackets
        raise UsageError(
            f"{path}: not valid TOML: {one_line(str(error), 300)}",
            hint="for an example, run `cloudddp init` in an empty folder",
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", hint="write one with `cloudddp init`"
        ) from None
    for section, content in values.items():
        if not isinstance(content, dict):
            _unknown_section(str(path), section)
    return Layer(str(path), values)


def _read(path: Path) -> bytes:
    """Return a file's content. Raises OSError; UsageError for what is no file (a pipe would not end) or none of ours."""
    # O_NONBLOCK: opening a pipe waits for somebody who writes.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UsageError(f"{path}: not a regular file", hint="write one with `cloudddp init`")
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise UsageError(
            f"{path}: over {LONGEST >> 20} MiB, which is no configuration", hint="name another --config"
        )
    return content


def _unknown_section(origin: str, section: str) -> None:
    if section in SECTIONS:
        raise UsageError(f"{origin}: {section} must be a table", hint=f"write it as [{section}]")
    hint = nearest(section, list(SECTIONS))
    for name in SECTIONS:
        if section in fields(name):
            hint = f"put it under [{name}]"
    raise UsageError(f"{origin}: unknown section or key {section!r}", hint=hint)


def environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    """Return a layer per CLOUDDDP_* variable. Raises UsageError for a misspelt one: it may be a cost cap."""
    names = {variable_of(s, k): (s, k) for s in SECTIONS for k in fields(s) if variable_of(s, k)}
    layers = []
    for variable, value in environ.items():
        if not variable.startswith("CLOUDDDP_") or variable.removeprefix("CLOUDDDP_") in OTHER_VARIABLES:
            continue
        if variable not in names:
            raise UsageError(f"unknown environment variable {variable}", hint=nearest(variable, list(names)))
        section, key = names[variable]
        layers.append(Layer(f"environment variable {variable}", {section: {key: value}}, textual=True))
    return layers


def variable_of(section: str, key: str) -> str:
    """Return the environment variable of a setting, or '' for tables, which have none."""
    if (section, key) == ("cluster", "name"):
        return "CLOUDDDP_CLUSTER"
    if section in ("sync", "setup"):
        return f"CLOUDDDP_{section.upper()}_{key.upper()}"
    return "" if key == "env" else f"CLOUDDDP_{key.upper()}"


def resolve(layers: Sequence[Layer]) -> Config:
    """Return the validated configuration of layers given from the strongest to the weakest.

    Raises UsageError naming the place, the key, the value and what is allowed.
    """
    chosen: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for layer in reversed(layers):
        for section, content in layer.values.items():
            if section not in SECTIONS:
                _unknown_section(layer.origin, section)
            for key, value in content.items():
                checked = _check(layer, section, key, value)
                if key == "env":  # tables merge, so that --env adds to the file's
                    checked = {**chosen[section].get("env", {}), **checked}
                chosen[section][key] = checked
    return Config(
        cluster=ClusterSpec(**chosen["cluster"]),
        job=JobSpec(**chosen["job"]),
        sync=SyncSpec(**chosen["sync"]),
        setup=SetupSpec(**chosen["setup"]),
    )


def _check(layer: Layer, section: str, key: str, value: Any) -> Any:
    known = fields(section)
    origin = layer.origin
    if key not in known:
        elsewhere = [name for name in SECTIONS if name != section and key in fields(name)]
        hint = f"put it under [{elsewhere[0]}]" if elsewhere else nearest(key, list(known))
        raise UsageError(f"{origin}: unknown key {section}.{key}", hint=hint)
    given = _from_text(known[key], value) if layer.textual else value
    try:
        checked = msgspec.convert(given, known[key], strict=not layer.textual)
        _encode(checked)
    except (msgspec.ValidationError, UnicodeEncodeError):
        checked = None
    # nan passes every comparison, so no limit catches it
    if checked is None or (isinstance(checked, float) and checked != checked):
        raise UsageError(
            f"{origin}: {section}.{key} = {_shown(key, value)} is not allowed",
            hint=f"allowed: {allowed(known[key])}",
        )
    if key == "env":
        _check_environment(origin, checked)
    if key == "ssh_from":
        _check_blocks(origin, checked)
    return checked


def _encode(value: Any) -> None:
    """Raise UnicodeEncodeError for what comes of bytes that are not UTF-8, in an argument or a variable."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, Mapping):
        _encode([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _encode(one)


def _shown(key: str, value: Any) -> str:
    """Return a value that is not allowed, for a message: no secret, and no more than a line."""
    if key == "env":
        return "****" if not isinstance(value, dict) else f"a table of {', '.join(map(repr, value))}"
    try:
        return one_line(repr(value), 100)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"


def _check_blocks(origin: str, blocks: Sequence[str]) -> None:
    for block in blocks:
        try:
            ipaddress.ip_network(block)
        except ValueError as error:
            raise UsageError(
                f"{origin}: cluster.ssh_from: {error}",
                hint="allowed: an address block such as 203.0.113.7/32",
            ) from None


def _from_text(hint: Any, value: Any) -> Any:
    """Return what a text stands for: a list where the setting is one, a number where a number or a word may be."""
    inner, _ = unwrap(hint)
    takes_list = any(get_origin(kind) is tuple for kind in (inner, *get_args(inner)))
    if isinstance(value, str) and takes_list and (get_origin(inner) is tuple or "," in value):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return parts if get_origin(inner) is tuple else [_numeric(part) for part in parts]
    return _numeric(value) if takes_list else value


def _numeric(value: Any) -> Any:
    """Turn '4' into 4 where the field is a union of number and word, which lax conversion does not try."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value


def _check_environment(origin: str, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if not _ENVIRONMENT_NAME.fullmatch(name) or "\0" in value:
            raise UsageError(
                f"{origin}: job.env name {name!r} is not allowed",
                hint="allowed: letters, digits and '_', not beginning with a digit; no NUL in the value",
            )
        if name in RESERVED_ENVIRONMENT:
            raise UsageError(
                f"{origin}: job.env sets {name}, which the launcher sets for each rank",
                hint="remove it; nproc_per_node, rendezvous and master_port shape the ranks",
            )
