"""What a verb works with: validated settings, and the AWS account and the cluster that they name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from cloudddp import timings
from cloudddp.aws.client import require_region
from cloudddp.config import packages, project, settings
from cloudddp.config.command_line import GlobalOptions
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.files import check_private, state_home
from cloudddp.operations.account import Account
from cloudddp.operations.load_settings import enter_simulator, layers_of, report_other_region, tolerated
from cloudddp.operations.reporter import ReporterT, ReporterT_co


@dataclass(frozen=True, slots=True)
class Session(Generic[ReporterT_co]):
    """`root` is the project's folder."""

    console: ReporterT_co
    options: GlobalOptions
    settings: Config
    root: Path
    account: Account
    files: tuple[Path, ...] = ()  # configuration files, by precedence
    variables: tuple[str, ...] = ()  # -e, as it was given
    env_files: tuple[str, ...] = ()


@timings.span("settings")
def start(
    console: ReporterT,
    options: GlobalOptions,
    *,
    dry_run: bool = False,
    tolerant_verb: str = "",
) -> Session[ReporterT]:
    """Return a session. Raises UsageError before anything is called. `tolerant_verb` is the verb, if it works
    with a broken configuration as long as the name of the cluster is certain. With --sim the simulator is
    started, unless it runs or this is a dry run, and this process is pointed at it."""
    flags, where = options.flags, project.find(options.config)
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
    checked, is_tolerant = packages.derived(where.root, checked), bool(tolerant_verb)
    account = Account(console, options, checked.cluster, tolerant=is_tolerant, broken=broken)
    return Session(
        console,
        options,
        checked,
        where.root,
        account,
        files=where.files,
        variables=options.variables,
        env_files=options.env_files,
    )
