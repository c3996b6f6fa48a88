"""In which regions a cluster may be, and what they answer: the one place that knows.

A name is unique in one region of an account only, and any computer may have chosen the region. A command must
not report that there is no cluster while one runs. So it looks in the configured regions, where this computer
has created a cluster of that name, and then in every region that is enabled in the account.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cloudddp.aws import denials, inventory
from cloudddp.aws.answers import REGION_REFUSED
from cloudddp.aws.caller import enabled_regions
from cloudddp.aws.client import AWS
from cloudddp.cluster import lookup
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.node_addresses import in_parallel
from cloudddp.errors import AWSError, CloudDDPError, ProgressCallback, StepWarning, q
from cloudddp.local_state import known_clusters

_NOT_LISTED = "other regions"  # of the account, if it does not say which it has


@dataclass(frozen=True, slots=True)
class Search:
    """What regions have answered: the clusters in each, also those that have ended; and the errors of the
    others, by region."""

    answers: Mapping[AWS, list[Cluster]] = field(default_factory=dict)
    failed: Mapping[str, CloudDDPError] = field(default_factory=dict)
    denied: tuple[str, ...] = ()  # by a policy of the organization, so that no cluster can be there

    @property
    def regions(self) -> list[str]:
        """The regions that have answered."""
        return [aws.region for aws in self.answers]

    @property
    def every(self) -> list[Cluster]:
        """The live clusters."""
        return [one for aws in self.answers for one in self.live(aws)]

    def live(self, aws: AWS) -> list[Cluster]:
        """Return the live clusters of one region that has answered."""
        return [one for one in self.answers[aws] if one.live]

    def of(self, name: str) -> dict[AWS, list[Cluster]]:
        """Return the live clusters of that name, for the regions that have any."""
        found = {aws: [one for one in self.live(aws) if one.name == name] for aws in self.answers}
        return {aws: clusters for aws, clusters in found.items() if clusters}

    def own(self, name: str, *, anyone: bool = False) -> dict[AWS, list[Cluster]]:
        """Return those of that name that have an instance of the caller's."""
        found = {}
        for aws, clusters in self.of(name).items():
            ownership = Ownership(aws, anyone=anyone)
            if own := [cluster for cluster in clusters if any(map(ownership.mine, cluster.live))]:
                found[aws] = own
        return found

    def others(self, name: str) -> list[Cluster]:
        """Return the caller's live clusters of other names."""
        owners = {aws: Ownership(aws) for aws in self.answers}
        live = [(aws, one) for aws in self.answers for one in self.live(aws)]
        return [one for aws, one in live if one.name != name and owners[aws].owns(one)]

    def merged(self, more: Search) -> Search:
        """Return the answers of both."""
        failed = {**self.failed, **more.failed}
        return Search({**self.answers, **more.answers}, failed, (*self.denied, *more.denied))

    def unanswered(self) -> str:
        """Return the regions that could not be asked, with the first reason; '' for none."""
        first = next((error.message for error in self.failed.values()), "")
        return f"{', '.join(self.failed)} ({first})" if first else ""


def recorded(aws: AWS, name: str | None = None) -> list[str]:
    """Return the regions where this computer created a cluster of that name (or any) that may exist."""
    known = (
        cluster
        for cluster in known_clusters()
        if cluster.endpoint == aws.endpoint and name in (None, cluster.name)
    )
    return sorted({one.region for one in known if aws.has_region(one.region)})


def ask(clouds: Sequence[AWS]) -> Search:
    """Ask regions for their clusters, of all names. One AWS call for each, several at a time."""
    for aws in clouds:
        aws.client("ec2")  # botocore creates clients in one thread only

    def one(aws: AWS) -> list[Cluster] | CloudDDPError:
        try:
            return lookup.find(aws)
        except CloudDDPError as error:
            return error

    answers, failed = {}, {}
    for aws, answer in zip(clouds, in_parallel([functools.partial(one, aws) for aws in clouds]), strict=True):
        if isinstance(answer, CloudDDPError):
            failed[aws.region] = answer
        else:
            answers[aws] = answer
    return Search(answers, failed)


def beyond(asked: AWS, name: str, configured: Iterable[str]) -> Search:
    """Look for a name outside of the region of `asked`, which has answered: in the configured and the
    recorded regions; if none has a live cluster of the caller's, in all others that are enabled."""
    known = recorded(asked, name)
    likely = [region for region in dict.fromkeys([*configured, *known]) if region != asked.region]
    first = ask([asked.at(region) for region in likely])
    if first.own(name):
        return first
    remaining = rest(asked, (asked.region, *first.regions))
    # What the organization denies to every user was not launched by one, and a region that the account has
    # not enabled has no cluster, unless it was before, when this computer created it.
    denied = {
        region
        for region, error in remaining.failed.items()
        if isinstance(error, AWSError) and error.organization and region not in known
    }
    relevant = {*remaining.failed, *known} - denied
    both = first.merged(remaining)
    failed = {
        region: error
        for region, error in both.failed.items()
        if region in relevant or _NOT_LISTED in relevant
    }
    return replace(both, failed=failed, denied=tuple(sorted(denied)))


def others(asked: AWS, found: Search, name: str) -> list[Cluster]:
    """Return the caller's live clusters of other names, in the regions of `found` and where this computer has
    created any: one AWS call for each that `found` lacks. One that does not answer is left out."""
    known = (*found.regions, *found.failed)
    more = [region for region in recorded(asked) if region not in known]
    return found.merged(ask([asked.at(region) for region in more])).others(name)


def with_addresses(found: Search, name: str, *, anyone: bool) -> list[AWS]:
    """Return the regions with Elastic IPs of the caller's clusters of that name, billed without nodes."""

    def own(aws: AWS) -> bool:
        ownership = Ownership(aws, anyone=anyone)
        return any(map(ownership.mine, inventory.resources(aws, inventory.named(name), ["Elastic IP"])))

    have = in_parallel([functools.partial(own, aws) for aws in found.answers])
    return [aws for aws, has in zip(found.answers, have, strict=True) if has]


def rest(asked: AWS, regions_asked: Collection[str]) -> Search:
    """Ask the other regions that are enabled in the account."""
    try:
        enabled = enabled_regions(asked)
    except CloudDDPError as error:
        if _code(error) in REGION_REFUSED and asked.region != asked.home_region:
            return rest(asked.at(asked.home_region), regions_asked)
        return Search(failed={_NOT_LISTED: error})
    return ask([asked.at(region) for region in enabled if region not in regions_asked])


def without_not_enabled(found: Search, name: str) -> Search:
    """Return the search without refusals of regions that the account has not enabled: no cluster is there,
    unless this computer has created one of that name. One AWS call, only after a refusal."""
    if not found.answers or not any(_code(error) in REGION_REFUSED for error in found.failed.values()):
        return found
    aws = next(iter(found.answers))
    try:
        relevant = (*enabled_regions(aws), *recorded(aws, name), _NOT_LISTED)
    except CloudDDPError:
        return found
    failed = {
        region: error
        for region, error in found.failed.items()
        if region in relevant or _code(error) not in REGION_REFUSED
    }
    return replace(found, failed=failed)


def not_enabled(found: Search, asked: AWS) -> dict[str, AWSError]:
    """Return an error for each region that refuses credentials which another one accepts, by region. If no
    other region was asked, the one that every account has enabled is, after a refusal: one AWS call."""
    codes = {one: _code(error) for one, error in found.failed.items() if _code(error) in REGION_REFUSED}
    accepting = _accepting(found)
    if codes and not accepting and asked.home_region not in found.failed:
        accepting = _accepting(ask([asked.at(asked.home_region)]))
    if not accepting:
        return {}
    return {
        region: AWSError(
            f"{region} refuses the credentials that {accepting[0]} accepts ({code}): the account has not "
            "enabled this region, or they have a version 1 STS token, which opt-in regions refuse",
            hint="choose another region; or enable it, which takes some minutes: `aws account enable-region "
            f"--region-name {q(region)}`",
            code=code,
        )
        for region, code in codes.items()
    }


def _accepting(found: Search) -> list[str]:
    """Return the regions that accept the credentials, also if a policy denies the call there."""
    return found.regions + [one for one, error in found.failed.items() if _code(error) in denials.CODES]


def _code(error: CloudDDPError) -> str:
    return error.code if isinstance(error, AWSError) else ""


def in_regions(clouds: Sequence[AWS], name: str, progress: ProgressCallback) -> Search:
    """Return the clusters of all names in the regions in which `up` may create one. One AWS call for each.

    A region is left out, with a message, if a policy denies the call there or the account has not enabled it:
    nothing can be launched there. Raises its AWSError if no other region is left, or if this computer has
    created a cluster of that name there, which may still be running.
    """
    found = ask(clouds)
    refused = not_enabled(found, clouds[0])
    for region, error in found.failed.items():
        ours = region in recorded(clouds[0], name)
        if not found.answers or ours or not (region in refused or _code(error) in denials.CODES):
            raise refused.get(region, error)
        if region in refused:
            why = refused[region].message
        else:
            why = f"{error.message}. A cluster {name!r} of another computer there would not be noticed"
        progress(StepWarning(f"{region} is left out: {why}"))
    return found
