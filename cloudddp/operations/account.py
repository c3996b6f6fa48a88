"""The caller's AWS account as one verb sees it: connections to it, and the region where the cluster is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from cloudddp import local_state
from cloudddp.aws.caller import enabled_regions
from cloudddp.aws.client import AWS, RegionError
from cloudddp.cluster import lookup, region_search
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.region_search import Search
from cloudddp.config.cluster_spec import Placement
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Message, q
from cloudddp.operations.reporter import Reporter


class Account:
    """Connects to AWS, where `spec` says that the cluster is; it remembers where that was found."""

    def __init__(
        self,
        console: Reporter,
        options: GlobalOptions,
        spec: Placement,
        *,
        tolerant: bool,
        broken: bool,
    ) -> None:
        """`tolerant`: of a region that does not exist. `broken`: a part of the configuration could not be
        used."""
        self.console, self.options, self.spec = console, options, spec
        self.tolerant, self.broken = tolerant, broken
        self.region: str | None = None  # of the cluster, where a verb has created it
        self._located: dict[str, str] = {}  # name -> region where a search has found the cluster
        self._reported: set[str] = set()  # what has been reported once

    def aws(self, *, finishing: bool = False) -> AWS:
        """Return a new connection to AWS in the cluster's region, with the credentials as they are now: the
        user may have logged in again during a long `run`. `finishing`: use credentials until they end,
        without asking for a new MFA code before."""
        if self.region or self.options.region:
            return self._connect(self.region or self.options.region, finishing=finishing)
        return self._in_region(self._connections(self.configured[:1], finishing=finishing)[0])

    def _in_region(self, found: AWS) -> AWS:
        """Return a connection to the region where the cluster is, as far as that is known, with the same
        credentials: a new connection may ask for an MFA code."""
        name = self.spec.name
        where = (name, found.endpoint)
        created = {
            cluster.region
            for cluster in local_state.live_clusters()
            if (cluster.name, cluster.endpoint) == where
        }
        known = [region for region in created if found.has_region(region)]
        region = self._located.get(name) or (known[0] if len(known) == 1 else None)
        if region in (None, found.region):
            return found
        how = "is" if name in self._located else "was created"
        self._report_once(f"using region {region}, where cluster {name} {how}", self.console.log)
        return found.at(region)

    def _report_once(self, text: str, report: Callable[[str], None]) -> None:
        if text not in self._reported:
            self._reported.add(text)
            report(text)

    def clouds(self) -> list[AWS]:
        """Return a new connection to AWS per region in which `up` looks for capacity, in order."""
        return self._connections(self.configured)

    def searched_regions(self, clouds: list[AWS]) -> list[AWS]:
        """Return `clouds`, and regions where a cluster of that name was created: `up` must not create a
        second."""
        if self.options.region:
            return clouds
        return self._with_regions(clouds, region_search.recorded(clouds[0], self.spec.name))

    def _with_regions(self, clouds: list[AWS], more: Sequence[str]) -> list[AWS]:
        known = [cloud.region for cloud in clouds]
        return clouds + [clouds[0].at(region) for region in dict.fromkeys(more) if region not in known]

    def listed_in(self, *, all_regions: bool) -> list[AWS]:
        """Return the regions that `ls` lists: with --region that one, else the configured ones and those in
        which this computer has created clusters; or all that are enabled in the account."""
        clouds = self.clouds()
        more = [] if self.options.region else region_search.recorded(clouds[0])
        more += enabled_regions(clouds[0]) if all_regions else []
        return self._with_regions(clouds, more)

    def look_beyond(self, asked: AWS) -> Search:
        """Look for the cluster wherever it may be other than in the region of `asked`."""
        configured = [region for region in self.configured if region and asked.has_region(region)]
        return region_search.beyond(asked, self.spec.name, configured)

    def relocated(self, asked: AWS, error: lookup.NoCluster) -> AWS:
        """Return a connection to the region where the cluster is, since it is not in that of `asked`. Raises
        CloudDDPError if it is in several, or in another one than --region says; `error`, with the regions
        that were asked, if it is in none."""
        name, found = self.spec.name, self.look_beyond(asked)
        places = found.own(name, anyone=self.options.anyone)
        if not places:
            from cloudddp.operations import termination  # records of jobs, which `down` does not need

            raise termination.no_cluster(error, name, asked, found)
        if len(places) > 1 or self.options.region:
            raise is_elsewhere(name, asked, places)
        self._located[name] = next(iter(places)).region
        return self._in_region(asked)

    @property
    def configured(self) -> Sequence[str | None]:
        """The configured regions, at least one; None for that of the AWS profile."""
        if self.spec.regions and not self.options.region:
            return self.spec.regions
        return [self.options.region or self.spec.region or os.environ.get("AWS_REGION") or None]

    def _connections(self, regions: Sequence[str | None], *, finishing: bool = False) -> list[AWS]:
        """Return a connection for each region. Where `tolerant`, without those that do not exist, and if none
        is left, in that of the AWS profile, or where this computer has created a cluster of that name."""
        if not self.tolerant:
            return [self._connect(region, finishing=finishing) for region in regions]
        found: list[AWS] = []
        wrong: RegionError | None = None
        known = [cluster.region for cluster in local_state.known_clusters() if cluster.name == self.spec.name]
        for region in (*regions, None, *known):
            if found and region not in regions:
                break
            try:
                found.append(self._connect(region, finishing=finishing))
            except RegionError as error:
                wrong = wrong or error
        if wrong is not None:
            if not found:
                raise wrong
            self.broken = True
            self._report_once(f"{wrong.message}; using {found[0].region}", self.console.warn)
        return found

    def _connect(self, region: str | None, *, finishing: bool = False) -> AWS:
        return AWS(
            region=region,
            profile=None if self.options.sim else self.options.profile,
            ask=self.console.ask_secret,
            finishing=finishing,
        )

    def ownership(self, aws: AWS) -> Ownership:
        return Ownership(aws, anyone=self.options.anyone)

    def cluster(self) -> Cluster:
        """Return the caller's live cluster of that name. Raises CloudDDPError where there is none."""
        aws = self.aws()
        try:
            found = lookup.get(aws, self.spec.name, self.ownership(aws))
        except lookup.NoCluster as error:
            aws = self.relocated(aws, error)
            found = lookup.get(aws, self.spec.name, self.ownership(aws))
        self.warn_of(found)
        return found

    def warn_of(self, found: Cluster) -> None:
        """Warn of what AWS shows, and of an `extend` that was not completed: tags may say more than
        timers."""
        for warning in found.warnings:
            self.console.warn(warning)
        record = local_state.ClusterFolder(found.id).record() if found.id else None
        if record is not None and record.extended == local_state.MOVING:
            again = f"`cloudddp extend --until {q(record.expires)}`"
            self.console.warn(
                Message(f"an `extend` was not completed, so nodes may end earlier: {again} completes it")
            )


def is_elsewhere(
    name: str, asked: AWS, places: Mapping[AWS, Sequence[Cluster]], verb: str = "status"
) -> CloudDDPError:
    """Return the error for a cluster that is in other regions than the one that was asked."""
    where = [aws.region for aws in places]
    commands = "; or ".join(f"`cloudddp {q(verb)} --region {q(region)}`" for region in where)
    return CloudDDPError(
        f"cluster {name!r} is in {' and '.join(where)}, not in {asked.region}",
        hint=f"repeat the command with that region, for example {commands}",
    )
