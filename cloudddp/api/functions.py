"""`up`, `attach` and `run`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cloudddp.api.call import Call, new_call, script_of
from cloudddp.api.callback import OnProgress
from cloudddp.api.cluster import Cluster, OnLine
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster.plan import Plan
from cloudddp.errors import Interrupted, UsageError
from cloudddp.formats import dollars, format_time
from cloudddp.job.follow.verdict import JobResult
from cloudddp.operations import process_nodes
from cloudddp.operations.lifecycle import bring_up, require_limits
from cloudddp.operations.start_job import checked_script, report_results_here, results_of


def up(
    *,
    cluster: str | None = None,
    config: str | os.PathLike[str] | None = None,
    region: str | None = None,
    profile: str | None = None,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> Cluster:
    """Create the cluster and return it when every node is ready to train, or return it if it exists.

    Nothing is asked: `max_hours` and `max_cost` limit the bill, and the nodes terminate at their deadline,
    also without this computer. After an error or an interrupt everything is removed again. `settings`: of
    [cluster] and [job], for all calls. Raises UsageError, CloudDDPError, Interrupted, Leftovers.
    """
    return _up(new_call(cluster, config, region, profile, on_progress, settings))


def _up(call: Call) -> Cluster:
    def agree(plans: Sequence[Plan], info: TypeInfo, _: AWS) -> None:
        price = plans[0].price
        call.reporter.log(
            f"starting {price.nodes} x {info.name} at {dollars(price.hour)} an hour, until "
            f"{format_time(plans[0].expires)} at the latest"
        )

    session = call.session()
    try:
        done = bring_up(session, agree)
    except KeyboardInterrupt:
        raise Interrupted("interrupted while nothing was being created") from None
    if done.plan is None:
        require_limits(session, done.cluster, {flag.key for flag in call.options.flags})
    return Cluster(call, done.cluster, created=done.plan is not None)


def attach(
    cluster: str | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    region: str | None = None,
    profile: str | None = None,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> Cluster:
    """Return a cluster that exists, by default the one of the project. Raises CloudDDPError if there is
    none."""
    call = new_call(cluster, config, region, profile, on_progress, settings)
    return Cluster(call, call.session().account.cluster(), created=False)


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    env: Mapping[str, str] | None = None,
    results: bool | str = False,
    on_line: OnLine | None = None,
    cluster: str | None = None,
    config: str | os.PathLike[str] | None = None,
    region: str | None = None,
    profile: str | None = None,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> JobResult:
    """Do a whole job: create a cluster, launch, wait, pull and remove it; return how the job ended.

    Arguments as of `up`, `Cluster.launch` and `Job.wait`. Raises UsageError before anything is created, also
    where the cluster exists.
    """
    call = new_call(cluster, config, region, profile, on_progress, settings)
    session = call.session(env)
    checked_script(session, script_of(script, args, module=module), fresh=True)
    process_nodes.check_role(session.settings)
    if not results_of(session, results):
        report_results_here(session, "run(..., results=True)")
    new = _up(call)
    if not new.created:
        raise UsageError(
            f"cluster {new.name!r} already exists; run creates and removes a cluster of its own",
            hint="attach() returns it; or choose another name with cluster=",
        )
    with new:
        return new.launch(script, args, module=module, env=env, results=results).wait(on_line=on_line)
