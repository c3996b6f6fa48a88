"""`down`: remove the cluster, and report what may remain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cloudddp import local_state
from cloudddp.aws import removal
from cloudddp.aws.answers import REGION_REFUSED
from cloudddp.aws.client import AWS
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import clusters as views
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import name_lock, region_search
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.region_search import Search
from cloudddp.cluster.teardown import DownReport
from cloudddp.errors import CloudDDPError, CredentialsError, Leftovers, Message, q, renewal_first
from cloudddp.formats import region_list
from cloudddp.operations.account import is_elsewhere
from cloudddp.operations.take_down import take_down


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a cluster of the name was looked for, and where it is."""

    here: Search  # the region of this run
    beyond: Search  # the other regions, where they had to be asked
    live: Mapping[AWS, list[Cluster]]  # what `down` removes
    elsewhere: Mapping[AWS, list[Cluster]]  # what it leaves, since another region was chosen


def down(console: Console) -> None:
    session = start_session(console, tolerant_verb="down")
    name, aws = session.settings.cluster.name, session.account.aws(finishing=True)
    found = _find(session, aws, name)
    _confirm(session, found.live)
    anyone, chosen = session.options.anyone, session.options.region
    # Without nodes something may be left of an earlier cluster.
    empty = not (found.live or chosen)
    billed = region_search.with_addresses(found.beyond, name, anyone=anyone) if empty else []
    places = dict.fromkeys([*found.live, *billed, *found.here.answers])
    reports = {place.region: take_down(session, place) for place in places}
    # In which this computer has created a cluster of that name that is not known to be gone.
    recorded = region_search.recorded(aws, name) if found.live and not found.beyond.answers else []
    ownership = session.account.ownership(aws)
    _report(session, ownership, reports, [region for region in recorded if region != aws.region])
    nothing = all(report.nothing for report in reports.values())
    if nothing and found.here.answers:
        _release_name(console, aws, name, ownership)
    _report_other_regions(session, aws, found, nothing=nothing)


def _find(session: Session, aws: AWS, name: str) -> _Found:
    """Return where the cluster is. Raises Leftovers if it is in several regions, or AWS answers nowhere."""
    account, anyone, chosen = session.account, session.options.anyone, session.options.region
    here = region_search.ask([aws])
    refused = next(iter(here.failed.values()), None)
    if isinstance(refused, CredentialsError) and refused.code not in REGION_REFUSED:
        raise _without_answer(aws, name, refused)
    live = here.own(name, anyone=anyone)
    # Another one of the same name may run in another region if this computer did not create the one that is
    # here, or if the configuration is broken.
    known = {cluster.id for cluster in local_state.known_clusters()}
    unsure = account.broken or any(
        cluster.id not in known for clusters in live.values() for cluster in clusters
    )
    beyond = account.look_beyond(aws) if not live or (unsure and not chosen) else Search()
    if refused is not None and not beyond.answers:
        raise _without_answer(aws, name, refused)
    elsewhere = beyond.own(name, anyone=anyone)
    if chosen:
        return _Found(here, beyond, live, elsewhere)
    if len(live | elsewhere) > 1:
        raise _in_several(name, live | elsewhere)
    return _Found(here, beyond, live or elsewhere, {})


def _confirm(session: Session, live: Mapping[AWS, list[Cluster]]) -> None:
    console = session.console
    found = [(aws, cluster) for aws, clusters in live.items() for cluster in clusters]
    if not found:
        return
    for warning in (text for _, cluster in found for text in cluster.warnings):
        console.warn(warning)
    console.print_text("\n".join(lifecycle.summary(cluster) for _, cluster in found), err=True)
    for line in (line for aws, cluster in found for line in _unsaved_work(session, aws, cluster)):
        console.log(type(line)(f"  warning: {line}"))
    console.must_confirm("Terminate these nodes?")


def _unsaved_work(session: Session, aws: AWS, cluster: Cluster) -> Sequence[str]:
    """Return what the nodes hold that would be lost. A broken installation must still end a bill."""
    try:
        from cloudddp.operations.unsaved_work import unsaved_work
    except ImportError as error:
        return [f"the nodes were not asked for results: {error}"]
    return unsaved_work(cluster, session.settings, aws=aws)


def _report(
    session: Session, ownership: Ownership, reports: dict[str, DownReport], created_elsewhere: list[str]
) -> None:
    """Print what was removed in each region. Raises CloudDDPError if all of it belongs to others."""
    console, name = session.console, session.settings.cluster.name
    others = [text for report in reports.values() for text in lifecycle.not_removed(report)]
    removed = {region: report for region, report in reports.items() if not report.nothing}
    if others and not removed:
        listed = "".join(f"\n  {text}" for text in others)
        raise CloudDDPError(
            f"cluster {name!r} is not yours; {ownership.caller}. Nothing was removed:{listed}",
            hint="to remove it anyway: `cloudddp down --anyone`",
        )
    for region, report in removed.items():
        shown = region if created_elsewhere or len(reports) > 1 else ""
        console.print_text(lifecycle.down(report, name, simulated=session.options.sim, region=shown))
    for text in others:
        console.log(f"not removed, because it is not yours: {text} (--anyone removes it)")
    for region in created_elsewhere:
        console.suggest(
            f"a cluster {name!r} was also created in {region} from this computer, and may still be up "
            f"there: `cloudddp down --region {q(region)}` removes it"
        )


def _in_several(name: str, places: Mapping[AWS, Sequence[Cluster]]) -> Leftovers:
    """Return the error for several clusters of that name, none of them where it was looked for first."""
    found = "".join(
        f"\n  {lifecycle.summary(cluster)}" for clusters in places.values() for cluster in clusters
    )
    commands = "; or ".join(f"`cloudddp down --region {q(aws.region)}`" for aws in places)
    return Leftovers(
        f"there is a cluster {name!r} in {len(places)} regions. Nothing was removed:{found}",
        hint=f"remove one with {commands}",
    )


def _report_other_regions(session: Session, aws: AWS, found: _Found, *, nothing: bool) -> None:
    """Report what other regions have or did not answer. Raises Leftovers if the cluster may be there."""
    console, name = session.console, session.settings.cluster.name
    asked = found.here.merged(found.beyond)
    if not session.options.region:
        asked = region_search.without_not_enabled(asked, name)
    for line in lifecycle.others(region_search.others(aws, asked, name)):
        console.log(line)
    if found.elsewhere:
        raise is_elsewhere(name, aws, found.elsewhere, "down")
    if asked.failed:
        text = f"a cluster {name!r} may run where AWS could not be asked: {asked.unanswered()}"
        if not (session.options.region or found.live):
            raise Leftovers(
                f"{text}. There is none in {region_list(asked.regions)}",
                hint="repeat `cloudddp down`; to look in one region only: `cloudddp down --region REGION`",
            )
        console.warn(text)
    if nothing:
        console.print_text(lifecycle.nothing(name, asked.regions, asked.denied))


def _without_answer(aws: AWS, name: str, error: CloudDDPError) -> CloudDDPError:
    """Return the error where AWS answered nowhere, with what this computer knows about the cluster."""
    lines = []
    for record in local_state.live_clusters():
        if (record.name, record.endpoint) == (name, aws.endpoint):
            ids: Iterable[str] = ()
            with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
                ids = local_state.ClusterFolder(record.id).created_instances()
            nodes = ", ".join(sorted(ids)) or "nodes unknown"
            where = f"({record.id}) in {record.region}"
            lines.append(f"\n  cluster {record.name} {where}: {nodes}, until {record.expires}")
    if not lines:
        return error
    return Leftovers(
        f"{error.message}. Nothing was removed, and this may still be running:{''.join(lines)}",
        hint=renewal_first(error, Message("`cloudddp down`")),
    )


def _release_name(console: Console, aws: AWS, name: str, ownership: Ownership) -> None:
    """Delete a key pair that reserves the name without being tagged as part of the cluster. Raises
    CloudDDPError if it belongs to another user: "does not exist" would be misleading."""
    holder = name_lock.holder(aws, name)
    if holder is None:
        return
    if not ownership.mine(holder):
        owner = holder.tags.owner or views.UNKNOWN_OWNER
        hint = "`cloudddp down --anyone` deletes it; or choose another name with -c"
        raise CloudDDPError(f"the name {name!r} is reserved by key pair {holder.id} of {owner}", hint=hint)
    if (error := removal.delete(aws, holder)) is not None:
        raise error
    console.print(f"cluster {name}: deleted key pair {holder.id}, which reserved the name")
