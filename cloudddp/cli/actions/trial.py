"""`doctor --trial`: create one cheap node in the user's account, check and use it, remove it, and report.

The report is for an issue: it has versions, times, and codes of errors, and no id, address, name or message.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cloudddp import __version__, signals, timings
from cloudddp.cli import session as sessions
from cloudddp.cli.actions.down import take_down
from cloudddp.cli.actions.up import bring_up
from cloudddp.cli.console import Console
from cloudddp.cli.node_connections import connected
from cloudddp.cli.session import Session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster.model import Cluster
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.spec import connection_mode
from cloudddp.errors import Leftovers, NodeError, UsageError
from cloudddp.files import write_atomic
from cloudddp.ssh.running import CommandSpec

_CHEAP = (
    Flag("--instance-type", "cluster", "instance_type", "g4dn.xlarge"),
    Flag("--max-hours", "cluster", "max_hours", "0.3333"),  # 20 minutes
    Flag("--max-cost", "cluster", "max_cost", "1"),
)
_ONE = Flag("--nodes", "cluster", "nodes", "1")

# A line `name=value` each. What a program does not print is missing.
_VERSIONS = """\
. /etc/os-release; echo "os=$ID $VERSION_ID"; echo "kernel=$(uname -r)"
echo "systemd=$(systemctl --version | head -n 1)"; echo "cloud-init=$(cloud-init --version 2>&1 | head -n 1)"
echo "ssh=$(ssh -V 2>&1 | head -n 1)"; echo "python=$(python3 --version)"
echo "driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
"""
_VERSION_LINE = re.compile(r"(os|kernel|systemd|cloud-init|ssh|python|driver)=([A-Za-z0-9 ._+~:,()/-]{1,80})")
_PACKAGES = ("boto3", "botocore", "paramiko", "click")
_EXPECTED = "DryRunOperation"  # what EC2 answers to a dry run of a call that it would allow


@dataclass(slots=True)
class Trial:
    """One trial, and what its report says about it."""

    console: Console
    options: GlobalOptions
    flags: Sequence[Flag]
    began: float = field(default_factory=time.monotonic)
    phases: list[dict[str, Any]] = field(default_factory=list)
    cluster: Cluster | None = None
    node: Mapping[str, str] = field(default_factory=dict)

    def run(self, check: Callable[[Session], None], *, yes: bool) -> None:
        """Make the checks of `doctor`, then the trial, and write the report, also about a failure.

        Raises the error of the step that failed; Leftovers if the node may still be running.
        """
        if any(flag.key == "nodes" for flag in self.flags):
            raise UsageError("a trial has one node", hint="leave out --nodes")
        given = {flag.key for flag in self.flags}
        flags = [*(flag for flag in _CHEAP if flag.key not in given), *self.flags, _ONE]
        session = sessions.start(
            self.console, replace(self.options, cluster=f"trial-{secrets.token_hex(3)}"), flags=flags
        )
        self.console.options = session.options  # the commands in messages name the trial's cluster
        if not self.options.timings:
            timings.enable()
        try:
            with self._phase("doctor"):
                check(session)
            self._use_node(session, yes=yes)
        finally:
            if _has_created():
                self._write(session)
            if not self.options.timings:
                timings.finish()  # they are in the report

    def _use_node(self, session: Session, *, yes: bool) -> None:
        try:
            with self._phase("up"), signals.interruptible():
                bring_up(session, yes=yes, on_ready=self._take)
            with self._phase("exec"), signals.interruptible(), connected(session) as (_, runner):
                result = runner.run(0, CommandSpec(_VERSIONS, limit=10_000, total_timeout=60.0))
                self.node = versions(result.stdout)
                if result.exit_code:
                    raise NodeError(f"node 0: a command that prints versions exited with {result.exit_code}")
        finally:
            if self.cluster is not None:
                with self._phase("down"):
                    report = take_down(replace(session, region=self.cluster.region), self.cluster.id)
                self.console.log(lifecycle.down(report, self.cluster.name, simulated=self.options.sim))

    def _take(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        phase: dict[str, Any] = {"name": name, "began": self._now()}
        self.phases.append(phase)
        try:
            yield
        except BaseException as error:
            phase["error"] = type(error).__name__
            phase["code"] = str(getattr(error, "code", "")) or None
            raise
        finally:
            phase["seconds"] = round(self._now() - phase["began"], 3)

    def _now(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def _write(self, session: Session) -> None:
        path = Path.cwd() / f"cloudddp-trial-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        try:
            write_atomic(path, json.dumps(self.report(session), indent=1) + "\n", mode=0o644)
        except (OSError, UsageError) as error:
            self.console.warn(f"the report cannot be written to {path}: {error}")
            return
        self.console.log(f"the report, which names no id and no address: {path}")

    def report(self, session: Session) -> dict[str, Any]:
        """Return the report. All text in it is from lists of known words, or was matched against a
        pattern."""
        spec = session.settings.cluster
        spans = [span for span in timings.recorded() if span.began >= self.began]
        failed = next((phase["name"] for phase in self.phases if "error" in phase), None)
        return {
            "format": 1,
            "result": "failed" if failed else "passed",
            "failed_in": failed,
            "left": any(phase.get("error") == Leftovers.__name__ for phase in self.phases),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "simulated": bool(self.options.sim),
            "versions": {
                "cloudddp": __version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                **{name: metadata.version(name) for name in _PACKAGES},
            },
            "cluster": {
                "region": self.cluster.region if self.cluster else session.clouds()[0].region,
                "type": spec.instance_type,
                "spot": spec.spot,
                "image": spec.image if spec.image.startswith("/aws/service/") else "own",
                "connect": connection_mode(spec),
            },
            "node": dict(self.node),
            "phases": self.phases,
            "aws_errors": [
                {"call": span.name.removeprefix("AWS "), "code": span.error}
                for span in spans
                if span.name.startswith("AWS ") and span.error not in ("", _EXPECTED)
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


def _has_created() -> bool:
    """Return whether the first of the creating calls was made, and not only as a dry run."""
    return any(
        span.name == "AWS ec2 import_key_pair" and span.error != _EXPECTED for span in timings.recorded()
    )


def versions(output: bytes) -> dict[str, str]:
    """Return the versions in what a node printed; lines of another form are ignored. Pure."""
    lines = (_VERSION_LINE.fullmatch(line.strip()) for line in output.decode(errors="replace").splitlines())
    return {found[1]: found[2].strip() for found in lines if found}
