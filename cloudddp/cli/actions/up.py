"""`up`: create the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloudddp import signals
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cli import session as sessions
from cloudddp.cli.actions import rehearsal
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import up as creating
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.up import UpResult
from cloudddp.config.options import Flag, GlobalOptions
from cloudddp.errors import Command, Interrupted
from cloudddp.job import ranks


def up(console: Console, options: GlobalOptions, *, flags: Sequence[Flag], dry_run: bool, yes: bool) -> None:
    session = sessions.start(console, options, flags=flags, dry_run=dry_run)
    if dry_run:
        rehearsal.up(console, session.settings)
        return
    try:
        created = bring_up(session, yes=yes)
    except KeyboardInterrupt:  # while resources are created it is an Interrupted, with everything removed
        raise Interrupted(
            "interrupted before anything was created, or when everything was ready",
            hint=(Command("status"), " shows which"),
        ) from None
    signals.ignore()  # the cluster is up, whether or not this is printed
    console.print(lifecycle.up(created))
    ignored = [flag.option for flag in flags if flag.key in ("max_hours", "max_cost")]
    if created.plan is None and ignored:
        console.warn(
            f"{' and '.join(ignored)} not applied: the deadline of a cluster is set when it is created"
        )
    console.log("next: ", Command("launch", "SCRIPT"), "   (", Command("down"), " stops the bill)")


def bring_up(
    session: Session,
    *,
    yes: bool,
    check: Callable[[Sequence[Plan], AWS], None] = lambda *_: None,
    on_ready: Callable[[Cluster], None] = lambda _: None,
) -> UpResult:
    """Create the cluster after asking, for `up` and `run`. Raises UsageError before that where a node would run more
    ranks than the type has GPUs. `check` is called then, and raises for what the credentials cannot do. `on_ready` is called with the cluster that was created, which the caller now has to remove."""
    console, spec, clouds = session.console, session.settings.cluster, session.clouds()
    with console.progress() as progress:

        def agree(plans: Sequence[Plan], info: TypeInfo) -> None:
            progress.stop()
            ranks.nproc(session.settings.job, [info.gpus] * spec.nodes)
            check(plans, clouds[0])
            console.print_text(lifecycle.plans(plans, info, spec, clouds[0].credentials_end()), err=True)
            console.must_confirm("Start these nodes?", yes=yes)

        return creating.up(clouds, spec, progress=progress, confirm=agree, on_ready=on_ready)
