"""The settings of a call: keyword arguments, the environment and cloudddp.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudddp.api.callback import Callback, OnProgress
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.schema import fields, nearest
from cloudddp.errors import UsageError
from cloudddp.operations import session as sessions
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session

IN_SIMULATOR = "CLOUDDDP_SIM"


@dataclass(frozen=True, slots=True)
class Call:
    """What the settings of a cluster are loaded from, at each call: files and the environment may change."""

    options: GlobalOptions
    flags: tuple[Flag, ...]
    reporter: Callback
    anyone: bool = False

    def session(self, env: Mapping[str, str] | None = None) -> Session[Reporter]:
        given = dict(env or {})
        more = [Flag("env", "job", "env", given)] if given else []
        return sessions.start(
            self.reporter,
            self.options,
            flags=[*self.flags, *more],
            anyone=self.anyone,
            variables=[f"{name}={value}" for name, value in given.items()],
        )


def new_call(
    cluster: str | None,
    config: str | os.PathLike[str] | None,
    region: str | None,
    profile: str | None,
    on_progress: OnProgress | None,
    settings: Mapping[str, Any],
    *,
    anyone: bool = False,
) -> Call:
    simulated = os.environ.get(IN_SIMULATOR, "").lower() in ("1", "true", "yes")
    file = None if config is None else os.fspath(config)
    options = GlobalOptions(cluster, file, region, profile, sim=simulated)
    return Call(options, flags_of(settings, "cluster", "job"), Callback(on_progress), anyone)


def flags_of(settings: Mapping[str, Any], *sections: str) -> tuple[Flag, ...]:
    """Return keyword arguments as settings. Raises UsageError for one that no section has."""
    own = ("name", "env")  # arguments of their own
    places = {key: section for section in sections for key in fields(section) if key not in own}
    for key in settings:
        if key not in places:
            where = " or ".join(f"[{section}]" for section in sections)
            raise UsageError(f"{key} is not a setting of {where}", hint=nearest(key, list(places)))
    return tuple(Flag(key, places[key], key, value) for key, value in settings.items())
