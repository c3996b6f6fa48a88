"""`up`: create the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloudddp import local_state, signals
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.up import UpResult
from cloudddp.errors import Interrupted
from cloudddp.operations import lifecycle as operation


def up(console: Console, *, dry_run: bool) -> None:
    session = start_session(console, dry_run=dry_run)
    if dry_run:
        # 30 ms, which only --dry-run needs: it imports what jobs need, too.
        from cloudddp.cli.actions import rehearsal

        rehearsal.up(console, session.settings)
        return
    try:
        created = bring_up(session)
    except KeyboardInterrupt:  # while resources are created it is an Interrupted, with everything removed
        hint = "`cloudddp status` shows whether there is a cluster"
        raise Interrupted("interrupted while nothing was being created", hint=hint) from None
    signals.ignore()  # the cluster is up, whether or not this is printed
    console.print_text(lifecycle.up(created))
    if created.plan is None:
        operation.require_limits(session, created.cluster, {flag.key for flag in session.options.flags})
    console.suggest("next: `cloudddp launch SCRIPT`   (`cloudddp down` stops the bill)")
    if (
        created.plan is not None and len(local_state.history(session.account.aws().endpoint)) == 1
    ):  # the first ever
        console.suggest("editors, rsync, scp: `cloudddp ssh-config` names the nodes for OpenSSH")


def bring_up(
    session: Session,
    *,
    check: Callable[[Sequence[Plan], AWS], None] = lambda *_: None,
    on_ready: Callable[[Cluster], None] = lambda _: None,
) -> UpResult:
    """Create the cluster after asking. `check` is called before, and raises for what the credentials cannot
    do; `on_ready` with the cluster, which the caller now has to remove. Raises NotConfirmed."""
    console = session.console

    def agree(plans: Sequence[Plan], info: TypeInfo, aws: AWS) -> None:
        check(plans, aws)
        shown = lifecycle.plans(plans, info, session.settings.cluster, aws.credentials.ends())
        console.print_text(shown, err=True)
        console.must_confirm("Start these nodes?")

    def name_others(others: Sequence[Cluster]) -> None:
        for line in lifecycle.others(others):
            console.log(line)

    return operation.bring_up(session, agree, on_ready=on_ready, on_others=name_others)
