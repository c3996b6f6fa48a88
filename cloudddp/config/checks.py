"""What types do not express: values that are not allowed, settings that contradict each other, and the tokens
of proxy_command. Pure. A problem is (what is wrong, what to do)."""

from __future__ import annotations

import ipaddress
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cloudddp.config import gpus
from cloudddp.config.cluster_spec import MAX_WAIT, Access
from cloudddp.config.package_inputs import LOCK, PROJECT
from cloudddp.config.spec import DATA, RESULTS, Config, DataSpec, JobSpec, SharedSpec
from cloudddp.config.values import seconds_of
from cloudddp.tags import MOST, extra_tag_problem

Problem = tuple[str, str]

_SHORTEST_IDLE = 5.0  # minutes of idle_minutes: less would end nodes between two commands
_MOST = 50  # [[data]] or [[shared]]: a request to an agent has at most 100 (agent.protocol.start)
_RESERVED = (".git", ".cloudddp", "cloudddp.toml", ".venv", ".conda")  # paths in the project
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Set for each rank by the launcher or torchrun: a value set by the user would silently be ignored.
RESERVED_ENVIRONMENT = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
# Options of torchrun that cloudddp sets, or that take the place of the script.
OF_TORCHRUN = """
    nnodes nproc-per-node max-restarts local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf
    standalone node-rank master-addr master-port no-python module run-path help
""".split()


_TOKENS: Mapping[str, str] = {
    "%h": "instance id",
    "%n": "instance id",
    "%a": "address",
    "%p": "port",
    "%r": "login user",
    "%%": "a percent sign",
}
"""What is replaced in proxy_command. ssh's own tokens but %a; with ssh, %h is the name that was given to it,
and AWS documents instance ids as names (`host i-* mi-*`)."""
_TOKEN = re.compile("%.?")
_SAFE = re.compile(r"[A-Za-z0-9_.:-]*")  # means the same inside quotes and outside


def _ssh_from(blocks: Iterable[str]) -> Problem | None:
    try:
        for block in blocks:
            ipaddress.ip_network(block)
    except ValueError as error:
        return str(error), "allowed: a CIDR block such as 203.0.113.7/32"
    return None


def _torchrun(options: Iterable[str]) -> Problem | None:
    for option in options:
        name = option.partition("=")[0].lstrip("-").replace("_", "-")
        if not option.startswith("-") or not name:
            hint = 'give each option with its value as one item: ["--numa-binding=node"]'
            return f"{option!r} is not an option", hint
        # torchrun takes the beginning of a name, too.
        if option[:2] in ("-m", "-h") or (
            option[:2] == "--" and any(own.startswith(name) for own in OF_TORCHRUN)
        ):
            hint = "remove it; use nproc_per_node, rendezvous, master_port and max_restarts instead"
            return f"{option} is an option that cloudddp sets itself", hint
    return None


def _environment(variables: Mapping[str, str]) -> Problem | None:
    for name, value in variables.items():
        if not _ENVIRONMENT_NAME.fullmatch(name) or "\0" in value:
            hint = "allowed: letters, digits and '_', not starting with a digit; no NUL in the value"
            return f"{name!r} is not allowed", hint
        if any("\ud800" <= character <= "\udfff" for character in value):
            hint = "encode it, for example with base64, and decode it in the script"
            return f"the value of {name} is not UTF-8", hint
        if name in RESERVED_ENVIRONMENT:
            hint = "remove it; use nproc_per_node, rendezvous and master_port instead"
            return f"{name} is set by the launcher for each rank", hint
    return None


def _gpu(wanted: str) -> Problem | None:
    return None if "." in wanted else gpus.problem(wanted)


def _wait_capacity(text: str) -> Problem | None:
    allowed = "allowed: 0, or a time such as 45s, 30m, 2h or 1d (at most 14d)"
    return (f"{text} is not allowed", allowed) if seconds_of(text) > MAX_WAIT else None


def _idle_minutes(value: float) -> Problem | None:
    short = 0 < value < _SHORTEST_IDLE
    return (f"{value:g} is not allowed", "allowed: 0, or a number from 5 to 20160") if short else None


VALUES: Mapping[str, Callable[[Any], Problem | None]] = {
    "env": _environment,
    "torchrun_args": _torchrun,
    "tags": extra_tag_problem,
    "instance_type": _gpu,
    "ssh_from": _ssh_from,
    "wait_capacity": _wait_capacity,
    "idle_minutes": _idle_minutes,
}
"""By the name of a setting, what is wrong with a value of it, if anything."""


def contradictions(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with settings together."""
    yield from connection(config.cluster)
    if len(config.cluster.tags) > MOST:  # of all sources together
        hint = f"allowed: up to {MOST}; EC2 allows 50 tags on a resource, and the others are for cloudddp"
        yield f"cluster.tags: {len(config.cluster.tags)} extra tags are too many", hint
    yield from _stall(config.job)
    if config.cluster.instance_profile is None:
        for one in uses_of_role(config.job, config.data):
            what = f"{one.setting} needs cluster.instance_profile: the nodes {one.use} with its role"
            yield what, f"give --instance-profile PROFILE to `up` (infra/iam/{one.policy} has its policy)"
    yield from _places(config)
    setup = config.setup
    if setup.extras and not (setup.environment or "").endswith((LOCK, PROJECT)):
        hint = "name one of them as setup.environment, or list the packages of the extras"
        yield "setup.extras has an effect with pyproject.toml or uv.lock only", hint
    if setup.wheels and setup.environment and setup.environment.endswith((".yml", ".yaml")):
        what = f"setup.wheels has no effect on {setup.environment}: conda installs no wheels"
        yield what, "list the packages in requirements.txt, or leave wheels out"


def connection(spec: Access) -> Iterator[Problem]:
    """Yield contradictions of the route to the nodes, and unknown tokens."""
    if spec.proxy_jump is not None and spec.proxy_command is not None:
        hint = "leave out one of them; a command can use a jump host itself: ssh -W %a:%p HOST"
        yield "cluster.proxy_jump and cluster.proxy_command exclude each other", hint
    if spec.connect == "jump" and spec.proxy_jump is None:
        yield 'cluster.connect is "jump", but there is no jump host', 'give proxy_jump = "user@host"'
    if spec.connect not in (None, "jump") and spec.proxy_jump is not None:
        what = f'cluster.connect is "{spec.connect}", but cluster.proxy_jump is set'
        yield what, 'leave out one of them; proxy_jump means connect = "jump"'
    port = re.search(r":(\d+)\Z", spec.proxy_jump or "")
    if port is not None and not 0 < int(port[1]) < 65536:
        yield f"cluster.proxy_jump: no such port: {spec.proxy_jump}", "allowed: 1 to 65535"
    for token in _TOKEN.findall(spec.proxy_command or ""):
        if token not in _TOKENS:
            known = ", ".join(f"{name} ({meaning})" for name, meaning in _TOKENS.items())
            yield f"cluster.proxy_command: unknown token {token}", f"known: {known}"


def expand_proxy_command(command: str, values: Mapping[str, str]) -> str:
    """Return a proxy command with its tokens replaced. Raises ValueError for a value that a shell could
    misread.

    Values are not quoted: AWS's documented command has %h inside quotes.
    """
    for value in values.values():
        if not _SAFE.fullmatch(value):
            raise ValueError(f"cannot be part of a command: {value!r}")
    known = {**values, "%%": "%"}
    return _TOKEN.sub(lambda found: known[found.group()], command)


def _stall(job: JobSpec) -> Iterator[Problem]:
    if 0 < job.stall_minutes * 60 < job.heartbeat:
        yield (
            f"job.stall_minutes = {job.stall_minutes:g} ({job.stall_minutes * 60:g} s) is below "
            f"job.heartbeat = {job.heartbeat:g} s, after which a silent node is lost",
            f"set it to at least {job.heartbeat / 60:g} minutes, or to 0 to watch for no stall",
        )
    if job.on_stall == "restart" and not job.retries:
        hint = "give --retries N, or choose kill, leave or down"
        yield 'job.on_stall = "restart" needs job.retries, and those are 0', hint


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


def _places(config: Config) -> Iterator[Problem]:
    """Yield [[data]] and [[shared]] without a path in the project, or where others are, or results, or files
    of cloudddp."""
    for section, count in (("data", len(config.data)), ("shared", len(config.shared))):
        if count > _MOST:
            what = f"{count} times [[{section}]], and at most {_MOST} are possible"
            yield what, "name the folder above them"
    places: list[DataSpec | SharedSpec] = [*config.data, *config.shared]
    for number, one in enumerate(places):
        for problem in _place_problems(one, places[:number], config.job.not_sent):
            section = "data" if isinstance(one, DataSpec) else "shared"
            source = json.dumps(one.source, ensure_ascii=False)
            yield f"[[{section}]] source = {source} {problem}", 'give another path = "FOLDER"'


def _place_problems(
    one: DataSpec | SharedSpec, before: Sequence[DataSpec | SharedSpec], outputs: Sequence[str]
) -> Iterator[str]:
    if one.place in ("", ".", "..", "~") or one.place.startswith("../"):
        yield "has no path in the project"
    variable = one.variable if isinstance(one, DataSpec) else ""
    if variable == DATA:
        yield f"has no letter or digit of A-Z, 0-9 in its path {one.place} for its variable {DATA}..."
    # Results may be in a shared folder, and it may be in theirs.
    results = (*outputs, RESULTS) if variable else (RESULTS,)
    for taken in (*results, *_RESERVED):
        if _overlap(one.place, posixpath.normpath(taken)):
            also = ", where jobs write results" if taken in results else ""
            yield f"has the path {one.place}, which overlaps {taken}{also}"
    for other in before:
        if _overlap(one.place, other.place):
            yield f"has the path {one.place}, which overlaps the path {other.place}"
        if variable and isinstance(other, DataSpec) and variable == other.variable:
            yield f"has the path {one.place}, which has the same variable as {other.place}, {variable}"


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
