"""Where settings come from: flags, environment, files; merged in layers, validated by the types of spec.py.

The layer with the highest precedence wins (flag > environment > ./cloudddp.toml > user configuration >
default). Every layer is validated and has an origin, so that an error names the place to fix.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import msgspec

from cloudddp.config import checks
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.command_line import Flag
from cloudddp.config.schema import LISTS, SECTIONS, allowed, fields, nearest, unwrap
from cloudddp.config.spec import DATA, Config, JobSpec, SetupSpec, SyncSpec
from cloudddp.config.values import why_not
from cloudddp.errors import Message, UsageError
from cloudddp.text import one_line

CREATE = Message("create one with `cloudddp init`")
TABLES = ("env", "tags")  # settings that are tables: all sources are merged, and no variable sets them
LONGEST = 1 << 20  # bytes of a configuration file
# CLOUDDDP_* variables that are not settings; any other one is a misspelt setting.
OTHER_VARIABLES = frozenset(
    """
        HOME CONFIG CHECKIP_URL CHECKSSH PROFILE YES SIM SIM_HOME SIM_NODES SIM_NODE SIM_ROOTS TASK TIME_SCALE
        JOB_ID NUM_NODES NODE_IPS NODE_RANK STATUS_FILE STEP_FILE ATTEMPT
    """.split()
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings: its name in errors, and {section: {key: value}}.

    `textual`: the values are strings (from flags or variables), so "4" may mean 4. `options` has, by
    (section, key), the option that gave a value.
    """

    origin: str
    values: Mapping[str, Mapping[str, Any]]
    textual: bool = False
    options: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def origin_of(self, section: str, key: str) -> str:
        return self.options.get((section, key), self.origin)


def from_flags(flags: Iterable[Flag]) -> Layer:
    """Return the settings given as options as one layer. The last of several values wins; tables are merged.
    Raises UsageError for two options that give the same setting."""
    values: dict[str, dict[str, Any]] = {}
    options: dict[tuple[str, str], str] = {}
    for flag in flags:
        section = values.setdefault(flag.section, {})
        merged = isinstance(flag.value, Mapping)
        other = options.get((flag.section, flag.key), flag.option)
        if other != flag.option and not merged:
            raise UsageError(f"{other} and {flag.option} exclude each other", hint="leave out one of them")
        section[flag.key] = {**section.get(flag.key, {}), **flag.value} if merged else flag.value
        options[flag.section, flag.key] = flag.option
    return Layer("the command line", values, textual=True, options=options)


def read_toml(path: Path) -> Layer:
    """Return a configuration file as a layer. Raises UsageError if it cannot be read or is not TOML."""
    content = ""
    try:
        content = read(path).decode("utf-8-sig")  # Windows editors write a byte order mark
        values = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        # tomllib's own errors, invalid UTF-8, thousands of digits or brackets.
        raise UsageError(
            f"{path}: not valid TOML: {one_line(str(error), 300)}{_line_of(str(error), content)}",
            hint="for an example, run `cloudddp init` in an empty folder",
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=CREATE) from None
    for section, content in values.items():
        is_list = section in LISTS and isinstance(content, list)
        if not (isinstance(content, dict) or is_list):
            unknown_section(str(path), section)
    return Layer(str(path), values)


def _line_of(message: str, content: str) -> str:
    """Return the line that an error of tomllib is about ("... (at line 3, column 10)"), to append; '' for
    none."""
    found = re.search(r"\(at line (\d{1,9}), column \d+\)", message)
    lines = content.split("\n")
    if found is None or not 0 < int(found[1]) <= len(lines):
        return ""
    line = re.sub(r"\b(notify|env)\b.*", r"\1 = ****", lines[int(found[1]) - 1].strip())  # it may be a secret
    return f": {one_line(line, 100)}"


def read(path: Path) -> bytes:
    """Return a file's content. Raises OSError; UsageError for a pipe or device, which might never end, or a
    huge file."""
    # O_NONBLOCK: opening a pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UsageError(f"{path}: not a regular file", hint=CREATE)
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise UsageError(
            f"{path}: larger than {LONGEST >> 20} MiB, so not a configuration file",
            hint="choose another file with --config",
        )
    return content


def unknown_section(origin: str, section: str) -> NoReturn:
    if section in SECTIONS:
        shown = f"[[{section}]]" if section in LISTS else f"[{section}]"
        raise UsageError(f"{origin}: {section} must be a table", hint=f"write it as {shown}")
    raise UsageError(f"{origin}: unknown section or key {section!r}", hint=_place(section, SECTIONS))


def _place(key: str, known: Iterable[str]) -> str:
    """Return the section of a key that is not known where it is; else the names that are."""
    sections = [name for name in SECTIONS if key in fields(name)]
    return f"put it under [{sections[0]}]" if sections else nearest(key, list(known))


def environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    """Return a layer per CLOUDDDP_* variable. Raises UsageError for an unknown one: it may be a misspelt cost
    limit."""
    names = {variable_of(s, k): (s, k) for s in SECTIONS for k in fields(s) if variable_of(s, k)}
    layers = []
    for variable, value in environ.items():
        name = variable.removeprefix("CLOUDDDP_")
        if name == variable or name in OTHER_VARIABLES or variable.startswith(DATA):
            continue
        if variable not in names:
            raise UsageError(f"unknown environment variable {variable}", hint=nearest(variable, list(names)))
        section, key = names[variable]
        layers.append(Layer(f"environment variable {variable}", {section: {key: value}}, textual=True))
    return layers


def variable_of(section: str, key: str) -> str:
    """Return the environment variable of a setting, or '' for a table, which has none."""
    if (section, key) == ("cluster", "name"):
        return "CLOUDDDP_CLUSTER"
    if section in LISTS:
        return ""
    if section in ("sync", "setup"):
        return f"CLOUDDDP_{section.upper()}_{key.upper()}"
    return "" if key in TABLES else f"CLOUDDDP_{key.upper()}"


def resolve(layers: Sequence[Layer]) -> Config:
    """Return the validated settings of layers, given by precedence, the highest first.

    Raises UsageError, naming the origin, the key, the value and what is allowed.
    """
    chosen: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS if name not in LISTS}
    lists: dict[str, tuple[Any, ...]] = {}
    for layer in reversed(layers):
        for section, content in layer.values.items():
            if section not in SECTIONS:
                unknown_section(layer.origin, section)
            if section in LISTS:
                lists[section] = _check_list(layer, section, content)
                continue
            for key, value in content.items():
                checked = check_value(layer, section, key, value)
                if key in TABLES:  # so that --env adds to the file's
                    checked = {**chosen[section].get(key, {}), **checked}
                chosen[section][key] = checked
    config = Config(
        cluster=ClusterSpec(**chosen["cluster"]),
        job=JobSpec(**chosen["job"]),
        sync=SyncSpec(**chosen["sync"]),
        setup=SetupSpec(**chosen["setup"]),
        **lists,
    )
    for what, hint in checks.contradictions(config):
        raise UsageError(what, hint=hint)
    return config


def _check_list(layer: Layer, section: str, content: Any) -> tuple[Any, ...]:
    """Return the [[data]] or [[shared]] of a file. Raises UsageError."""
    kind: Any = SECTIONS[section]
    found: list[Any] = []
    needed = "source" if section == "data" else "path"
    for one in content if isinstance(content, list) else [content]:
        if not isinstance(one, dict):
            unknown_section(layer.origin, section)
        values = {key: check_value(layer, section, key, value) for key, value in one.items()}
        if needed not in values:
            raise UsageError(
                f"{layer.origin}: [[{section}]] has no {needed}", hint=f'add {needed} = "FOLDER"'
            )
        found.append(kind(**values))
    return tuple(found)


def check_value(layer: Layer, section: str, key: str, value: Any) -> Any:
    known = fields(section)
    origin = layer.origin_of(section, key)
    if key not in known:
        raise UsageError(f"{origin}: unknown key {section}.{key}", hint=_place(key, known))
    given = _given(layer, section, known[key], value) if isinstance(value, str) else value
    if section == "job" and given == "" and type(None) in get_args(known[key]):
        return None  # switched off for one run
    if key == "instance_type" and isinstance(given, list):
        given = ",".join(map(str, given))
    try:
        checked = msgspec.convert(given, known[key], strict=not layer.textual)
        if key != "env":  # raises UnicodeEncodeError for an argument or a variable that was not UTF-8
            msgspec.json.encode(checked)
    except (msgspec.ValidationError, UnicodeEncodeError):
        checked = None
    # nan passes every comparison, so no limit rejects it
    if checked is None or (isinstance(checked, float) and checked != checked):
        raise UsageError(
            f"{origin}: {section}.{key} = {_shown(key, value)} is not allowed{why_not(key, given)}",
            hint=f"allowed: {allowed(known[key])}",
        )
    if (check := checks.VALUES.get(key)) and (problem := check(checked)):
        raise UsageError(f"{origin}: {section}.{key}: {problem[0]}", hint=problem[1])
    return checked


def _shown(key: str, value: Any) -> str:
    """Return a rejected value for a message: on one line, and without secrets."""
    if key in ("env", "notify"):
        return "****" if not isinstance(value, dict) else f"a table of {', '.join(map(repr, value))}"
    try:
        return one_line(repr(value), 100)
    except ValueError:  # more digits than Python converts
        return "a number of thousands of digits"


def _given(layer: Layer, section: str, hint: Any, text: str) -> Any:
    """Return what a string means where a list is allowed: its parts, but in a file one part, and only in
    [cluster]; a number where one or a list of them is allowed, too, which msgspec does not convert."""
    inner, _ = unwrap(hint)
    is_list = get_origin(inner) is tuple
    if not is_list and all(get_origin(kind) is not tuple for kind in get_args(inner)):
        return text
    if is_list and not layer.textual:
        return [text] if section == "cluster" else text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if is_list:
        return parts
    numbers = [
        int(part) if re.fullmatch(r"\d{1,9}", part) else part for part in (parts if "," in text else [text])
    ]
    return numbers if "," in text else numbers[0]
