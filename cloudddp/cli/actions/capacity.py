"""`capacity`: show where AWS has or sells capacity."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.aws import instance_types, offerings
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.views import capacity as view
from cloudddp.cluster.survey import survey
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.errors import CloudDDPError, Command, UsageError


def capacity(
    console: Console, options: GlobalOptions, *, flags: Sequence[Flag], days: int, as_json: bool
) -> None:
    """Print it. Raises UsageError for what is not sold; CloudDDPError if no region answers or has a type."""
    if not offerings.is_duration(days):
        raise UsageError(
            f"there is no capacity block of {days} days",
            hint=f"give --days 1 to 14, or whole weeks up to {offerings.LONGEST}: 21, 28, 35 ...",
        )
    session = sessions.start(console, options, flags=flags)
    spec, clouds = session.settings.cluster, session.clouds()
    instance_types.require_known_types(clouds[0], spec)
    found = survey(clouds, spec, days)
    if as_json:
        console.print_json([view.record(place, spec.nodes) for place in found])
    else:
        console.print_text("\n\n".join(map(view.place, found)))
    if sold := [place for place in found if place.blocks]:
        nodes, words = str(spec.nodes), ("--reservation", "cr-...", "-t", sold[0].type)
        use = Command("up", *words, "-n", nodes, "--region", sold[0].region)
        console.log("from its start on, a block is used with the id of its reservation: ", use)
    if all(place.info is None for place in found):
        (problem, *_) = found[0].problems.values()
        raise CloudDDPError("no region has the type, or answers", hint=problem.hint)
