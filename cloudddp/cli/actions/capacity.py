"""`capacity`: show where AWS has or sells capacity."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.aws import instance_types, offerings
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.views import capacity as view
from cloudddp.cluster.survey import survey
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.errors import CloudDDPError, UsageError


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
        console.print_json([view.record(place, spec.nodes, console.render) for place in found])
    else:
        texts = [*map(view.place, found), view.purchases(found, console.render)]
        console.print_text("\n\n".join(text for text in texts if text))
    if all(place.info is None for place in found):
        (problem, *_) = found[0].problems.values()
        raise CloudDDPError("no region has the type, or answers", hint=problem.hint)
