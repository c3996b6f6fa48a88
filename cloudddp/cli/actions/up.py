"""`up`: create the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from cloudddp import local_state, signals
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cli.views import lifecycle
from cloudddp.cli.views.clusters import time_left
from cloudddp.cluster.extend import ROUNDING, Limits
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.up import UpResult
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.errors import CloudDDPError, Interrupted
from cloudddp.formats import dollars
from cloudddp.operations import lifecycle as operation


def up(console: Console, options: GlobalOptions, *, flags: Sequence[Flag], dry_run: bool, yes: bool) -> None:
    session = sessions.start(console, options, flags=flags, dry_run=dry_run)
    if dry_run:
        # 30 ms, which only --dry-run needs: it imports what jobs need, too.
        from cloudddp.cli.actions import rehearsal

        rehearsal.up(console, session.settings)
        return
    try:
        created = bring_up(session, yes=yes)
    except KeyboardInterrupt:  # while resources are created it is an Interrupted, with everything removed
        raise Interrupted(
            "interrupted while nothing was being created",
            hint="`cloudddp status` shows whether there is a cluster",
        ) from None
    signals.ignore()  # the cluster is up, whether or not this is printed
    console.print_text(lifecycle.up(created))
    if created.plan is None:
        _require_limits(created.cluster, session, flags)
    console.suggest("next: `cloudddp launch SCRIPT`   (`cloudddp down` stops the bill)")
    if created.plan is not None and len(local_state.history(session.aws().endpoint)) == 1:  # the first ever
        console.suggest("editors, rsync, scp: `cloudddp ssh-config` names the nodes for OpenSSH")


def _require_limits(existing: Cluster, session: Session, flags: Sequence[Flag]) -> None:
    """Raise CloudDDPError if a cluster that exists may run for longer or cost more than the options allow."""
    given, spec, now = {flag.key for flag in flags}, session.settings.cluster, datetime.now(UTC)
    ends, beyond = existing.expires, []
    if "max_hours" in given and (ends is None or ends > now + timedelta(hours=spec.max_hours)):
        verb = "is" if existing.overdue else "runs for another"
        beyond.append(f"{verb} {time_left(existing)}, more than --max-hours {spec.max_hours:g}")
    if "max_cost" in given and spec.max_cost is not None:
        usd = Limits(now, now, now, existing.cost(now).usd, existing.hour).cost(ends) if ends else None
        if usd is None or usd > ROUNDING * spec.max_cost:
            beyond.append(
                f"may cost {dollars(usd)} until its deadline, more than --max-cost {spec.max_cost:g}"
            )
    if beyond:
        raise CloudDDPError(
            f"cluster {existing.name!r} was created before and {' and '.join(beyond)}. Nothing was changed",
            hint="leave that option out, or move the deadline: `cloudddp extend --until TIME`",
        )
    if "max_hours" in given:
        session.console.suggest(
            f"cluster {existing.name!r} was created before, and ends in {time_left(existing)}: `cloudddp "
            "extend --hours H` moves its deadline"
        )


def bring_up(
    session: Session,
    *,
    yes: bool,
    check: Callable[[Sequence[Plan], AWS], None] = lambda *_: None,
    on_ready: Callable[[Cluster], None] = lambda _: None,
) -> UpResult:
    """Create the cluster after asking, for `up` and `run`.

    `check` is called before it asks, and raises for what the credentials cannot do; `on_ready` with the
    cluster that was created, which the caller now has to remove. Raises NotConfirmed.
    """
    console = session.console

    def agree(plans: Sequence[Plan], info: TypeInfo, aws: AWS) -> None:
        check(plans, aws)
        shown = lifecycle.plans(plans, info, session.settings.cluster, aws.credentials_end())
        console.print_text(shown, err=True)
        console.must_confirm("Start these nodes?", yes=yes)

    def name_others(others: Sequence[Cluster]) -> None:
        for line in lifecycle.others(others):
            console.log(line)

    return operation.bring_up(session, agree, on_ready=on_ready, on_others=name_others)
