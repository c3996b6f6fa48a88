"""Creating the cluster of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster import up as creating
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.up import UpResult
from cloudddp.job import ranks
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session


def bring_up(
    session: Session[Reporter],
    agree: Callable[[Sequence[Plan], TypeInfo, AWS], None],
    *,
    on_ready: Callable[[Cluster], None] = lambda _: None,
    on_others: Callable[[Sequence[Cluster]], None] = lambda _: None,
) -> UpResult:
    """Create the cluster, or return the one that exists.

    `agree` is called with the plans before anything is created, and raises to refuse them; `on_ready` and
    `on_others` as of `cluster.up`. Raises UsageError before, where a node would run more ranks than a type
    has GPUs.
    """
    spec, clouds = session.settings.cluster, session.clouds()
    with session.console.progress() as progress:

        def confirm(plans: Sequence[Plan], info: TypeInfo) -> None:
            progress.stop()
            for one in plans:
                ranks.nproc(session.settings.job, [one.context.info.gpus] * spec.nodes)
            agree(plans, info, clouds[0])

        return creating.up(
            clouds,
            spec,
            progress=progress,
            confirm=confirm,
            on_ready=on_ready,
            looked_in=session.looked_in(clouds),
            project=session.root.name,
            on_others=on_others,
        )
