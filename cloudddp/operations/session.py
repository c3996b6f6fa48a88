"""What a verb works with: validated settings, and the AWS account and the cluster that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from cloudddp import local_state, timings
from cloudddp.aws.caller import enabled_regions
from cloudddp.aws.client import AWS, RegionError, require_region
from cloudddp.cluster import lookup, region_search
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.region_search import Search
from cloudddp.config import packages, project, settings
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError, Message, UsageError, q
from cloudddp.files import check_private, state_home
from cloudddp.operations.load_settings import enter_simulator, layers_of, report_other_region, tolerated
from cloudddp.operations.reporter import ReporterT, ReporterT_co


@dataclass(frozen=True, slots=True)
class Session(Generic[ReporterT_co]):
    """`root` is the project's folder. With `anyone`, verbs also act on clusters of others."""

    console: ReporterT_co
    options: GlobalOptions
    settings: Config
    root: Path
    anyone: bool = False
    region: str | None = None  # of the cluster, where a verb has created it
    _reported: set[str] = field(default_factory=set)  # what has been logged once
    # Name -> region where a search has found the cluster.
    _located: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()  # configuration files, by precedence
    variables: tuple[str, ...] = ()  # -e, as it was given
    env_files: tuple[str, ...] = ()
    tolerant: bool = False  # of a region that does not exist
    _broken: list[bool] = field(default_factory=list)

    def aws(self, *, finishing: bool = False) -> AWS:
        """Return a new connection to AWS in the cluster's region, with the credentials as they are now.

        A long `run` reconnects before its teardown: the user may have logged in again in between.
        `finishing`: use credentials until they end, without asking for a new MFA code before.
        """
        if self.region or self.options.region:
            return self._connect(self.region or self.options.region, finishing=finishing)
        return self._in_region(self._connections(self.configured[:1], finishing=finishing)[0])

    def _in_region(self, found: AWS) -> AWS:
        """Return a connection to the region where the cluster is, as far as that is known, with the same
        credentials: a new connection may ask for an MFA code."""
        name = self.settings.cluster.name
        region = self._located.get(name) or self._created_in(found)
        if region in (None, found.region):
            return found
        text = (
            f"using region {region}, where cluster {name} {'is' if name in self._located else 'was created'}"
        )
        if text not in self._reported:
            self._reported.add(text)
            self.console.log(text)
        return found.at(region)

    def clouds(self) -> list[AWS]:
        """Return a new connection to AWS per region in which `up` looks for capacity, in order."""
        return self._connections(self.configured)

    def looked_in(self, clouds: list[AWS]) -> list[AWS]:
        """Return `clouds`, and without --region those in which this computer has created a cluster of that
        name: `up` must not create a second one."""
        if self.options.region:
            return clouds
        known = region_search.recorded(clouds[0], self.settings.cluster.name)
        return clouds + [
            clouds[0].at(region) for region in known if region not in [one.region for one in clouds]
        ]

    def listed_in(self, *, all_regions: bool) -> list[AWS]:
        """Return the regions that `ls` lists: with --region that one, else the configured ones and those in
        which this computer has created clusters; or all that are enabled in the account."""
        clouds = self.clouds()
        more = [] if self.options.region else region_search.recorded(clouds[0])
        more += enabled_regions(clouds[0]) if all_regions else []
        known = [one.region for one in clouds]
        return clouds + [clouds[0].at(region) for region in dict.fromkeys(more) if region not in known]

    def look_beyond(self, asked: AWS) -> Search:
        """Look for the cluster wherever it may be other than in the region of `asked`."""
        configured = [region for region in self.configured if region and asked.has_region(region)]
        return region_search.beyond(asked, self.settings.cluster.name, configured)

    @property
    def broken(self) -> bool:
        """Whether a part of the configuration could not be used."""
        return any(self._broken)

    def relocated(self, asked: AWS, error: lookup.NoCluster) -> AWS:
        """Return a connection to the region where the cluster is, since it is not in that of `asked`.

        Raises CloudDDPError if it is in several, or in another one than --region says; `error`, with the
        regions that were asked, if it is in none.
        """
        name, found = self.settings.cluster.name, self.look_beyond(asked)
        places = found.own(name, anyone=self.anyone)
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
        spec = self.settings.cluster
        if spec.regions and not self.options.region:
            return spec.regions
        return [self.options.region or spec.region or os.environ.get("AWS_REGION") or None]

    def _connections(self, regions: Sequence[str | None], *, finishing: bool = False) -> list[AWS]:
        """Return a connection for each region. Where `tolerant`, without those that do not exist, and if none
        is left, in that of the AWS profile, or where this computer has created a cluster of that name."""
        if not self.tolerant:
            return [self._connect(region, finishing=finishing) for region in regions]
        found: list[AWS] = []
        wrong: RegionError | None = None
        known = [one.region for one in local_state.known_clusters() if one.name == self.settings.cluster.name]
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
            self._broken.append(True)
            if wrong.message not in self._reported:
                self._reported.add(wrong.message)
                self.console.warn(f"{wrong.message}; using {found[0].region}")
        return found

    def _connect(self, region: str | None, *, finishing: bool = False) -> AWS:
        return AWS(
            region=region,
            profile=None if self.options.sim else self.options.profile,
            ask=self.console.ask_secret,
            finishing=finishing,
        )

    def _created_in(self, asked: AWS) -> str | None:
        """Return the region in which this computer created the cluster of that name; None if it is not known
        or not one."""
        created = {
            one.region
            for one in local_state.live_clusters()
            if (one.name, one.endpoint) == (self.settings.cluster.name, asked.endpoint)
            and asked.has_region(one.region)
        }
        return created.pop() if len(created) == 1 else None

    def ownership(self, aws: AWS) -> Ownership:
        return Ownership(aws, anyone=self.anyone)

    def cluster(self) -> Cluster:
        """Return the caller's live cluster of that name. Raises CloudDDPError where there is none."""
        aws = self.aws()
        try:
            found = lookup.get(aws, self.settings.cluster.name, self.ownership(aws))
        except lookup.NoCluster as error:
            aws = self.relocated(aws, error)
            found = lookup.get(aws, self.settings.cluster.name, self.ownership(aws))
        self.warn_of(found)
        return found

    def warn_of(self, found: Cluster) -> None:
        """Warn of what AWS shows, and of an `extend` of this computer that was not completed: tags may say a
        later time than timers."""
        for warning in found.warnings:
            self.console.warn(warning)
        record = local_state.ClusterFolder(found.id).record() if found.id else None
        if record is not None and record.extended == local_state.MOVING:
            again = f"`cloudddp extend --until {q(record.expires)}`"
            self.console.warn(
                Message(f"an `extend` was not completed, so nodes may end earlier: {again} completes it")
            )


@timings.span("settings")
def start(
    console: ReporterT,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag] = (),
    anyone: bool = False,
    dry_run: bool = False,
    variables: Sequence[str] = (),
    env_files: Sequence[str] = (),
    tolerant_verb: str = "",
) -> Session[ReporterT]:
    """Return a session. Raises UsageError before anything is called.

    `tolerant_verb` is the verb, if it works with a broken configuration as long as the name of the cluster is
    certain. With --sim the simulator is started, unless it runs, and this process is pointed at it. Not for a
    dry run.
    """
    where = project.find(options.config)
    if where.from_parent:
        console.log(f"using {where.from_parent}")
    if options.region and any(flag.key == "regions" for flag in flags):
        raise UsageError("--region and --regions exclude each other", hint="give only one of them")
    broken = False
    try:
        layers = layers_of(options, flags, where)
        checked = settings.resolve(layers)
        report_other_region(console, options, checked, layers)
    except UsageError:
        if not tolerant_verb:
            raise
        checked, broken = tolerated(console.warn, options, where, tolerant_verb), True
    if not dry_run:
        check_private(state_home())
        if options.sim:
            if options.region:
                require_region(options.region)  # before anything is started
            enter_simulator(console)
            # Its SSH port is a setting.
            if broken:
                checked = tolerated(lambda _: None, options, where, tolerant_verb)
            else:
                checked = settings.resolve(layers_of(options, flags, where))
    if options.profile and not options.sim:
        os.environ["AWS_PROFILE"] = options.profile  # for a proxy command that calls AWS, such as `aws ssm`
    return Session(
        console,
        options,
        packages.derived(where.root, checked),
        where.root,
        anyone,
        files=where.files,
        variables=tuple(variables),
        env_files=tuple(env_files),
        tolerant=bool(tolerant_verb),
        _broken=[broken],
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
