"""`doctor`: check whether `up` would work."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cluster.doctor import Check, ChecksFailed, examine
from cloudddp.cluster.up import check_settings
from cloudddp.errors import UsageError
from cloudddp.formats import plural

_LONGEST = "ec2:CreatePlacementGroup"  # name of a check: each line is printed before the next check is known


def doctor(console: Console, *, trial: bool, as_json: bool) -> None:
    if not trial:
        check(start_session(console), as_json=as_json)
        return
    from cloudddp.cli.actions.trial import Trial  # 30 ms: it imports what up, exec and down need

    if as_json:
        raise UsageError("--trial writes a report of its own", hint="leave out --json")
    Trial(console, check).run()


def check(session: Session, *, as_json: bool = False) -> list[Check]:
    """Print and return the checks. Raises ChecksFailed if one fails and `up` would work in no region."""
    console = session.console
    spec, clouds = session.settings.cluster, session.account.clouds()
    check_settings(clouds, spec)
    checks: list[Check] = []
    several = ([cloud.region for cloud in clouds], [candidate.label for candidate in spec.candidates])
    width = len(_LONGEST) + sum(2 + max(map(len, names)) for names in several if len(names) > 1)
    for one in examine(clouds, spec):
        checks.append(one)
        fix = f"\n      -> {console.render(one.fix)}" if one.fix else ""
        if not as_json:
            console.print_text(f"{one.status}  {one.title:{width}}  {one.detail}{fix}")
    if as_json:
        console.print_json([_record(console, one) for one in checks])
    failed = [one.title for one in checks if one.status == "fail"]
    if failed and not _a_place_passes(checks):
        raise ChecksFailed(f"{plural(len(failed), 'check')} failed: {', '.join(failed)}", checks)
    return checks


def _a_place_passes(checks: Sequence[Check]) -> bool:
    """Return whether `up` would work with some type in some region: it leaves out the others."""
    failed = {(check.region, check.candidate) for check in checks if check.status == "fail"}
    places = {(check.region, check.candidate) for check in checks if check.region}
    return all(region for region, _ in failed) and not places <= failed


def _record(console: Console, check: Check) -> dict[str, str | None]:
    return {
        "name": check.title,
        "region": check.region or None,
        "status": check.status,
        "detail": check.detail,
        "fix": console.render(check.fix),
    }
