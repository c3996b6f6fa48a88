"""`doctor --trial`: create one cheap node in the user's account, check and use it, remove it, and report.

The report is for an issue: it has versions, times, and codes of errors, and no id, address, name or message.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from cloudddp import __version__, signals, timings
from cloudddp.cli.actions.up import bring_up
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import offers
from cloudddp.cluster.doctor import Check, ChecksFailed
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.wait_ready import ready_minutes
from cloudddp.config.cluster_spec import connection_mode
from cloudddp.config.command_line import Flag
from cloudddp.errors import (
    CloudDDPError,
    Interrupted,
    Leftovers,
    Message,
    NodeError,
    NotConfirmed,
    UsageError,
    q,
)
from cloudddp.operations.node_connections import connected
from cloudddp.operations.take_down import take_down_id
from cloudddp.ssh.running import CommandSpec

_CHEAP = (
    Flag("--instance-type", "cluster", "instance_type", "g4dn.xlarge"),
    Flag("--max-cost", "cluster", "max_cost", "1"),
)
_USE_MINUTES = 10.0  # of a trial after its node is ready
_ONE = Flag("--nodes", "cluster", "nodes", "1")
# Settings of a file that are about its own type of nodes: defaults, unless they are given as flags.
_OF_ANOTHER_TYPE: Mapping[str, Any] = {
    **dict.fromkeys(("price", "reservation")),
    **dict.fromkeys(("spot", "allow_cpu", "require_efa"), False),
}

# A line `name=value` each. What a program does not print is missing.
_VERSIONS = """\
. /etc/os-release; echo "os=$ID $VERSION_ID"; echo "kernel=$(uname -r)"
echo "systemd=$(systemctl --version | head -n 1)"; echo "cloud-init=$(cloud-init --version 2>&1 | head -n 1)"
echo "ssh=$(ssh -V 2>&1 | head -n 1)"; echo "python=$(python3 --version)"
echo "driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
echo "date=$(date --version | head -n 1)"
PATH=$PATH:/usr/sbin:/sbin
for name in python pip uv aws docker exportfs mount.nfs4 mount.lustre apt-get dnf nv-fabricmanager; do
    if command -v $name > /dev/null; then programs="${programs:-} $name"; fi
done
echo "programs=${programs:-none}"
echo "modules of python3=$(python3 -c 'from importlib.util import find_spec
print(*[name for name in ("sys", "pip", "ensurepip", "boto3", "torch") if find_spec(name)])')"
for folder in /opt/pytorch /opt/dlami/nvme; do
    may=; [ -w $folder ] || may="not "
    echo "$folder=$(stat -c 'mode %a, mounted at %m' $folder 2> /dev/null || echo missing), ${may}writable"
done
case " $(id -nG) " in *" docker "*) echo "group docker=yes" ;; *) echo "group docker=no" ;; esac
echo "nofile=soft $(ulimit -Sn), hard $(ulimit -Hn)"; echo "memlock=soft $(ulimit -Sl), hard $(ulimit -Hl)"
"""
_VERSION_LINE = re.compile(
    r"(os|kernel|systemd|cloud-init|ssh|python|driver|date|programs|modules of python3|/opt/pytorch"
    r"|/opt/dlami/nvme|group docker|nofile|memlock)= *([A-Za-z0-9/][A-Za-z0-9 ._+~:,()/-]{0,119})"
)
_PACKAGES = ("boto3", "botocore", "paramiko", "click")
_EXPECTED = "DryRunOperation"  # what EC2 answers to a dry run of a call that it would allow
_BEFORE_LAUNCH = (UsageError, click.UsageError, NotConfirmed, click.Abort)  # Abort: Ctrl-C at the question


@dataclass(slots=True)
class Trial:
    """One trial, and what its report says about it."""

    command: Console  # of `doctor`
    check: Callable[[Session], Sequence[Check]]  # of `doctor`
    began: float = field(default_factory=time.monotonic)
    phases: list[dict[str, Any]] = field(default_factory=list)  # as in the report; times in seconds
    errors: list[BaseException] = field(default_factory=list)  # that have ended phases
    cluster: Cluster | None = None
    node: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[Check] = ()
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))
    report_folder: Path = field(default_factory=Path.cwd)

    def run(self) -> None:
        """Make the checks of `doctor`, then the trial, and write the report, also about a failure.

        Raises the error of the step that failed; Leftovers if the node may still run; at first UsageError.
        """
        options = self.command.options
        given = {flag.key for flag in options.flags}
        if options.cluster or "nodes" in given:
            raise UsageError("a trial has one node in a cluster of its own", hint="leave out -n and -c")
        if not os.access(self.report_folder, os.W_OK):
            what = f"the report cannot be written to {self.report_folder}"
            raise UsageError(what, hint="change to another folder")
        flags = (*(flag for flag in _CHEAP if flag.key not in given), *options.flags, _ONE)
        own = replace(options, cluster=f"trial-{self.suffix}", flags=flags)
        session = self._session(Console(own), given)  # the commands in its messages name the trial's cluster
        if not options.timings:
            timings.enable()
        try:
            with self._phase("doctor"):
                self._check_limit(session)
                self._check(session)
            self._use_node(session)
        finally:
            if self.cluster is not None or not self._ended_by(_BEFORE_LAUNCH):
                self._write(session)
            if self._ended_by(Leftovers):
                self.command.options = own  # the cluster may still exist
            if not options.timings:
                timings.finish()  # they are in the report

    @staticmethod
    def _session(console: Console, given: Collection[str]) -> Session:
        """Return the session of a cluster with one cheap node, whatever the configuration files say of it."""
        session = start_session(console)
        others = {key: value for key, value in _OF_ANOTHER_TYPE.items() if key not in given}
        spec = replace(session.settings.cluster, **others)
        if "max_hours" not in given:
            spec = replace(spec, max_hours=(ready_minutes(spec, 2) + _USE_MINUTES) / 60)
        return replace(session, settings=replace(session.settings, cluster=spec))

    def _check(self, session: Session) -> None:
        try:
            self.checks = self.check(session)
        except ChecksFailed as failure:
            self.checks = failure.checks
            if not any((check.name, check.status) == ("quota", "fail") for check in failure.checks):
                raise
            words = ("doctor", "--trial", "-t", "t3.large", "--price", "0.09", "--allow-cpu")
            again = f"without a GPU, which needs another quota: `cloudddp {q(*words)}`"
            raise CloudDDPError(failure.message, hint=again) from None

    def _check_limit(self, session: Session) -> None:
        """Raise UsageError if max_cost ends the trial before its node has to be ready."""
        for spec in session.settings.cluster.candidates:
            cost = 0.0
            with contextlib.suppress(CloudDDPError):  # without a price, the checks say why
                cost = offers.price(session.account.clouds()[0], spec).hour * spec.max_hours
            if spec.max_cost is not None and cost > spec.max_cost:
                raise UsageError(
                    f"a trial of {spec.instance_type} takes up to {60 * spec.max_hours:.0f} minutes, to boot "
                    f"and be used, and costs up to ${cost:.2f}; max_cost is ${spec.max_cost:.2f}",
                    hint=f"give --max-cost {math.ceil(cost)}, or --max-hours",
                )

    def _use_node(self, session: Session) -> None:
        try:
            with self._phase("up"), signals.interruptible():
                bring_up(session, on_ready=partial(setattr, self, "cluster"))
            with self._phase("exec"), signals.interruptible(), connected(session) as (_, runner):
                command = CommandSpec(_VERSIONS, limit=10_000, total_timeout=60.0, until_exit=True)
                result = runner.run(0, command)
                self.node = versions(result.stdout)
                if result.exit_code:
                    raise NodeError(f"node 0: a command that prints versions exited with {result.exit_code}")
        except NodeError as failure:  # its hint is about a cluster that stays up
            again = Message("the trial's node is removed; to try another one: `cloudddp doctor --trial`")
            raise CloudDDPError(failure.message, hint=again) from None
        finally:
            if self.cluster is not None:
                with self._phase("down"):
                    session.account.region = self.cluster.region
                    aws = session.account.aws(finishing=True)
                    report = take_down_id(session, aws, self.cluster.id)
                shown = lifecycle.down(report, self.cluster.name, simulated=session.options.sim)
                session.console.log(shown)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        phase: dict[str, Any] = {"name": name, "began": self._now(), "seconds": 0.0}
        self.phases.append(phase)
        try:
            yield
        except BaseException as error:
            self.errors.append(error)
            code = getattr(error, "code", None)
            phase["error"] = type(error).__name__
            phase["code"] = _code(code) if isinstance(code, str) and code else None
            raise
        finally:
            phase["seconds"] = round(self._now() - phase["began"], 3)

    def _now(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def _ended_by(self, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        return any(isinstance(error, kinds) for error in self.errors)

    def _write(self, session: Session) -> None:
        path = self.report_folder / f"cloudddp-trial-{datetime.now(UTC):%Y%m%d-%H%M%S}-{self.suffix}.json"
        text = json.dumps(self.report(session), indent=1) + "\n"
        try:
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)
            session.console.log(f"the report, without ids and addresses: {path}")
        except OSError as error:
            session.console.warn(f"cannot write {path}: {error.strerror}. The report:")
            session.console.print(text)

    def report(self, session: Session) -> dict[str, Any]:
        """Return the report. Its text is from lists of known words, or was matched against a pattern."""
        spec = session.settings.cluster
        spans = [span for span in timings.recorded() if span.began >= self.began]
        failed_in = next((phase["name"] for phase in self.phases if "error" in phase), None)
        stopped = self._ended_by((Interrupted, KeyboardInterrupt))
        return {
            "format": 1,
            "result": "interrupted" if stopped else "failed" if failed_in else "passed",
            "failed_in": failed_in,
            "left": self._ended_by(Leftovers),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "simulated": bool(session.options.sim),
            "versions": {
                "cloudddp": __version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                **{name: metadata.version(name) for name in _PACKAGES},
            },
            "cluster": {
                "region": self.cluster.region if self.cluster else session.account.clouds()[0].region,
                "type": spec.instance_type,
                "spot": spec.spot,
                "image": spec.image if spec.image.startswith("/aws/service/") else "own",
                "connect": connection_mode(spec),
            },
            "checks": {check.title: check.status for check in self.checks},
            "node": dict(self.node),
            "phases": self.phases,
            "aws_calls": [
                {"call": span.name.removeprefix("AWS "), "code": _code(span.error), "retries": span.retries}
                for span in spans
                if span.retries or span.error not in ("", _EXPECTED)
            ],
            "steps": [
                {
                    "name": span.name,
                    "began": round(span.began - self.began, 3),
                    "seconds": round(span.ended - span.began, 3),
                }
                for span in sorted(spans, key=lambda span: span.began)
            ],
        }


def _code(text: str) -> str:
    """Return a code if it looks like one of AWS's: an endpoint that is not AWS may answer anything."""
    return text if re.fullmatch(r"[A-Za-z][A-Za-z0-9.]{0,79}|", text) else "unknown"


def versions(output: bytes) -> dict[str, str]:
    """Return the versions in what a node printed; lines of another form are ignored. Pure."""
    lines = (_VERSION_LINE.fullmatch(line.strip()) for line in output.decode(errors="replace").splitlines())
    return {found[1]: found[2].strip() for found in lines if found}
