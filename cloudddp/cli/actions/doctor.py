"""`doctor`: check whether `up` would work."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.formats import counted
from cloudddp.cluster import preconditions
from cloudddp.cluster.doctor import Check, examine
from cloudddp.config.options import Flag, GlobalOptions
from cloudddp.errors import CloudDDPError


def doctor(console: Console, options: GlobalOptions, *, flags: Sequence[Flag], as_json: bool) -> None:
    session = sessions.start(console, options, flags=flags)
    spec, clouds = session.settings.cluster, session.clouds()
    preconditions.check(clouds, spec)
    checks: list[Check] = []
    for check in examine(clouds, spec):
        checks.append(check)
        if not as_json:
            console.print(_shown(console, check))
    if as_json:
        console.print_json([_record(console, check) for check in checks])
    failed = [check.name for check in checks if check.status == "fail"]
    if failed:
        raise CloudDDPError(f"{counted(len(failed), 'check')} failed: {', '.join(failed)}")


def _shown(console: Console, check: Check) -> str:
    fix = f"\n      -> {console.render(check.fix)}" if check.fix else ""
    return f"{check.status}  {check.name:20}  {check.detail}{fix}"


def _record(console: Console, check: Check) -> dict[str, str]:
    fix = console.render(check.fix)
    return {"name": check.name, "status": check.status, "detail": check.detail, "fix": fix}
