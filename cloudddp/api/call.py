"""The settings of a call: keyword arguments, the environment and cloudddp.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudddp.api.callback import Callback, OnProgress, warn_in_event_loop
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.schema import fields, nearest
from cloudddp.errors import UsageError
from cloudddp.job.job_request import Script
from cloudddp.operations import session as sessions
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session

IN_SIMULATOR = "CLOUDDDP_SIM"


@dataclass(frozen=True, slots=True)
class Call:
    """What the settings of a cluster are loaded from, at each call: files and the environment may change."""

    options: GlobalOptions
    reporter: Callback
    region: str | None = None  # of the cluster, once it is known

    def session(self, env: Mapping[str, str] | None = None) -> Session[Reporter]:
        warn_in_event_loop()
        options = self.options
        if env:
            variables = tuple(f"{name}={value}" for name, value in env.items())
            flags = (*options.flags, Flag("env", "job", "env", dict(env)))
            options = replace(options, flags=flags, variables=variables)
        session = sessions.start(self.reporter, options)
        session.account.region = self.region
        return session

    def with_settings(self, flags: Sequence[Flag]) -> Call:
        return replace(self, options=replace(self.options, flags=(*self.options.flags, *flags)))


def new_call(
    cluster: str | None,
    config: str | os.PathLike[str] | None,
    region: str | None,
    profile: str | None,
    on_progress: OnProgress | None,
    settings: Mapping[str, Any],
) -> Call:
    simulated = os.environ.get(IN_SIMULATOR, "").lower() in ("1", "true", "yes")
    file = None if config is None else os.fspath(config)
    flags = flags_of(settings, "cluster", "job")
    options = GlobalOptions(cluster, file, region, profile, sim=simulated, flags=flags)
    return Call(options, Callback(on_progress))


def flags_of(settings: Mapping[str, Any], *sections: str) -> tuple[Flag, ...]:
    """Return keyword arguments as settings. Raises UsageError for one that no section has."""
    own = ("name", "env")  # arguments of their own
    places = {key: section for section in sections for key in fields(section) if key not in own}
    for key in settings:
        if key not in places:
            where = " or ".join(f"[{section}]" for section in sections)
            hint = 'cluster="NAME" names the cluster' if key == "name" else nearest(key, list(places))
            hint += "; arguments of the script are a list: args=[...]"
            raise UsageError(f"{key} is not a setting of {where}", hint=hint)
    return tuple(Flag(key, places[key], key, value) for key, value in settings.items())


def script_of(script: str, args: Sequence[str], *, module: bool) -> Script:
    """Return what the ranks run. Raises UsageError for arguments that are not a list of strings."""
    if isinstance(args, str) or not all(isinstance(one, str) for one in args):
        raise UsageError(f"args={args!r} is not a list of strings", hint='args=["--epochs", "10"]')
    return Script(script, tuple(args), module)
