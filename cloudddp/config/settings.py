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
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

import msgspec

from cloudddp.config import data_checks, gpus, value_checks
from cloudddp.config.command_line import Flag
from cloudddp.config.connection import check_connection
from cloudddp.config.package_inputs import LOCK, PROJECT
from cloudddp.config.schema import LISTS, SECTIONS, allowed, fields, nearest, unwrap
from cloudddp.config.spec import (
    DATA,
    MAX_WAIT,
    ClusterSpec,
    Config,
    DataSpec,
    JobSpec,
    SetupSpec,
    SyncSpec,
    seconds_of,
    why_not,
)
from cloudddp.errors import Message, UsageError
from cloudddp.tags import extra_tag_problem, too_many_extra_tags
from cloudddp.text import one_line

CREATE = Message("create one with `cloudddp init`")
TABLES = ("env", "tags")  # settings that are tables: all sources are merged, and no variable sets them
SHORTEST_IDLE = 5.0  # minutes of idle_minutes
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
    hint = nearest(section, list(SECTIONS))
    for name in SECTIONS:
        if section in fields(name):
            hint = f"put it under [{name}]"
    raise UsageError(f"{origin}: unknown section or key {section!r}", hint=hint)


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
                if key == "tags":
                    _require(layer.origin_of(section, key), too_many_extra_tags(checked))
                chosen[section][key] = checked
    check_connection(cluster := ClusterSpec(**chosen["cluster"]))
    _check_stall(job := JobSpec(**chosen["job"]))
    _check_role(cluster, job, lists.get("data", ()))
    data_checks.check(job, lists.get("data", ()), lists.get("shared", ()))
    _check_packages(setup := SetupSpec(**chosen["setup"]))
    return Config(
        cluster=cluster,
        job=job,
        sync=SyncSpec(**chosen["sync"]),
        setup=setup,
        **lists,
    )


def _check_stall(job: JobSpec) -> None:
    """Raise UsageError for settings about stalled jobs that contradict others."""
    if 0 < job.stall_minutes * 60 < job.heartbeat:
        raise UsageError(
            f"job.stall_minutes = {job.stall_minutes:g} ({job.stall_minutes * 60:g} s) is below "
            f"job.heartbeat = {job.heartbeat:g} s, after which a silent node is lost",
            hint=f"set it to at least {job.heartbeat / 60:g} minutes, or to 0 to watch for no stall",
        )
    if job.on_stall == "restart" and not job.retries:
        raise UsageError(
            'job.on_stall = "restart" needs job.retries, and those are 0',
            hint="give --retries N, or choose kill, leave or down",
        )


class RoleUse(NamedTuple):
    """A setting that needs a role of the nodes, what for, and which file of infra/iam has the policy."""

    setting: str
    use: str
    policy: str


def uses_of_role(job: JobSpec, data: Sequence[DataSpec]) -> list[RoleUse]:
    image = job.container if job.container and ".dkr.ecr" in job.container.partition("/")[0] else None
    found = [
        ("job.results_s3", job.results_s3, "write there", "README.md"),
        ("job.container", image, "log in to ECR", "container.json"),
        *(("[[data]] source", one.source, "read it", "data.json") for one in data if one.is_s3),
    ]
    return [RoleUse(f"{name} = {value}", use, policy) for name, value, use, policy in found if value]


def _check_role(cluster: ClusterSpec, job: JobSpec, data: Sequence[DataSpec]) -> None:
    """Raise UsageError where nodes need permissions and have no role that may have them."""
    for one in uses_of_role(job, data) if cluster.instance_profile is None else ():
        raise UsageError(
            f"{one.setting} needs cluster.instance_profile: the nodes {one.use} with its role",
            hint=f"give --instance-profile PROFILE to `up` (infra/iam/{one.policy} has its policy)",
        )


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
        if problem := data_checks.problem(spec := kind(**values), found):
            raise UsageError(f"{layer.origin}: {problem}", hint='give another path = "FOLDER"')
        found.append(spec)
    if len(found) > data_checks.MOST:
        raise UsageError(
            f"{layer.origin}: {len(found)} times [[{section}]], and at most {data_checks.MOST} are possible",
            hint="name the folder above them",
        )
    return tuple(found)


def _check_packages(setup: SetupSpec) -> None:
    """Raise UsageError for wheels or extras that nothing would install."""
    if setup.extras and not (setup.environment or "").endswith((LOCK, PROJECT)):
        raise UsageError(
            "setup.extras has an effect with pyproject.toml or uv.lock only",
            hint="name one of them as setup.environment, or list the packages of the extras",
        )
    if setup.wheels and setup.environment and setup.environment.endswith((".yml", ".yaml")):
        raise UsageError(
            f"setup.wheels has no effect on {setup.environment}: conda installs no wheels",
            hint="list the packages in requirements.txt, or leave wheels out",
        )


def check_value(layer: Layer, section: str, key: str, value: Any) -> Any:
    known = fields(section)
    origin = layer.origin_of(section, key)
    if key not in known:
        elsewhere = [name for name in SECTIONS if name != section and key in fields(name)]
        hint = f"put it under [{elsewhere[0]}]" if elsewhere else nearest(key, list(known))
        raise UsageError(f"{origin}: unknown key {section}.{key}", hint=hint)
    given = _from_text(known[key], value) if layer.textual else _listed(section, known[key], value)
    if section == "job" and given == "" and type(None) in get_args(known[key]):
        return None  # switched off for one run
    if key == "instance_type" and isinstance(given, list):
        given = ",".join(map(str, given))
    try:
        checked = msgspec.convert(given, known[key], strict=not layer.textual)
        _encode(checked)
    except (msgspec.ValidationError, UnicodeEncodeError):
        checked = None
    # nan passes every comparison, so no limit rejects it
    if checked is None or (isinstance(checked, float) and checked != checked):
        raise UsageError(
            f"{origin}: {section}.{key} = {_shown(key, value)} is not allowed{why_not(key, given)}",
            hint=f"allowed: {allowed(known[key])}",
        )
    if key == "env":
        value_checks.environment(origin, checked)
    if key == "torchrun_args":
        value_checks.torchrun(origin, checked)
    if key == "tags":
        _require(origin, extra_tag_problem(checked))
    if key == "instance_type" and "." not in checked:
        _require(origin, gpus.problem(checked), key)
    if key == "ssh_from":
        value_checks.ssh_from(origin, checked)
    too_long = key == "wait_capacity" and seconds_of(checked) > MAX_WAIT
    # Less would end nodes between two commands.
    too_short = key == "idle_minutes" and 0 < checked < SHORTEST_IDLE
    if too_long or too_short:
        raise UsageError(
            f"{origin}: cluster.{key} = {checked} is not allowed",
            hint=f"allowed: {allowed(known[key])}",
        )
    return checked


def _require(origin: str, problem: tuple[str, str] | None, key: str = "tags") -> None:
    """Raise UsageError for a problem, given as (what is wrong, what is allowed)."""
    if problem is not None:
        raise UsageError(f"{origin}: cluster.{key}: {problem[0]}", hint=problem[1])


def _encode(value: Any) -> None:
    """Raise UnicodeEncodeError for text with surrogates: an argument or variable that was not UTF-8."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, Mapping):
        _encode([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _encode(one)


def _shown(key: str, value: Any) -> str:
    """Return a rejected value for a message: on one line, and without secrets."""
    if key in ("env", "notify"):
        return "****" if not isinstance(value, dict) else f"a table of {', '.join(map(repr, value))}"
    try:
        return one_line(repr(value), 100)
    except ValueError:  # more digits than Python converts
        return "a number of thousands of digits"


def _from_text(hint: Any, value: Any) -> Any:
    """Return the value that a string means: a list for a list setting, a number where a number or a word is
    allowed."""
    inner, _ = unwrap(hint)
    takes_list = any(get_origin(kind) is tuple for kind in (inner, *get_args(inner)))
    if isinstance(value, str) and takes_list and (get_origin(inner) is tuple or "," in value):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return parts if get_origin(inner) is tuple else [_numeric(part) for part in parts]
    return _numeric(value) if takes_list else value


def _listed(section: str, hint: Any, value: Any) -> Any:
    """Return a list for one string where [cluster] takes a list: zones = "us-east-1a"; and a number where a
    word is allowed, too: nproc_per_node = "2"."""
    if get_origin(unwrap(hint)[0]) is not tuple:
        return _from_text(hint, value)
    return [value] if section == "cluster" and isinstance(value, str) else value


def _numeric(value: Any) -> Any:
    """Turn '4' into 4 where the field is a union of number and word, which msgspec does not convert."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value
