"""`doctor`: check whether `up` would work."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cluster.doctor import Check, ChecksFailed, examine
from cloudddp.cluster.up import check_settings
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.errors import UsageError
from cloudddp.formats import counted

_LONGEST = "ec2:CreatePlacementGroup"  # name of a check: each line is printed before the next check is known


def doctor(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    trial: bool,
    as_json: bool,
    yes: bool,
) -> None:
    if not trial:
        check(start_session(console, options, flags=flags), as_json=as_json)
        return
    from cloudddp.cli.actions.trial import Trial  # 30 ms: it imports what up, exec and down need

    if as_json:
        raise UsageError("--trial writes a report of its own", hint="leave out --json")
    Trial(console, options, flags, check).run(yes=yes)


def check(session: Session, *, as_json: bool = False) -> list[Check]:
    """Print the checks, and return them. Raises ChecksFailed if one fails, unless `up` would work in another
    region."""
    console = session.console
    spec, clouds = session.settings.cluster, session.clouds()
    check_settings(clouds, spec)
    checks: list[Check] = []
    width = len(_LONGEST) + max((len(f"{aws.region}: ") for aws in clouds if len(clouds) > 1), default=0)
    if len(spec.candidates) > 1:
        width += max(len(f"{one.label}: ") for one in spec.candidates)
    for one in examine(clouds, spec):
        checks.append(one)
        if not as_json:
            console.print_text(_shown(console, one, width))
    if as_json:
        console.print_json([_record(console, one) for one in checks])
    failed = [one.name for one in checks if one.status == "fail"]
    if failed and not _a_place_passes(checks):
        raise ChecksFailed(f"{counted(len(failed), 'check')} failed: {', '.join(failed)}", checks)
    return checks


def _a_place_passes(checks: Sequence[Check]) -> bool:
    """Return whether `up` would work with one of several types or in one of several regions: it leaves out
    the others."""
    failed = {(check.region, check.candidate) for check in checks if check.status == "fail"}
    places = {(check.region, check.candidate) for check in checks if check.region}
    return all(region for region, _ in failed) and not places <= failed


def _shown(console: Console, check: Check, width: int) -> str:
    fix = f"\n      -> {console.render(check.fix)}" if check.fix else ""
    return f"{check.status}  {check.name:{width}}  {check.detail}{fix}"


def _record(console: Console, check: Check) -> dict[str, str | None]:
    fix = console.render(check.fix)
    return {
        "name": check.name,
        "region": check.region or None,
        "status": check.status,
        "detail": check.detail,
        "fix": fix,
    }
