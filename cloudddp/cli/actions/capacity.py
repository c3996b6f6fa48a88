"""`capacity`: show where AWS has or sells capacity."""

from __future__ import annotations

import msgspec

from cloudddp.aws import instance_types
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cli.views import capacity as view
from cloudddp.cluster.survey import survey
from cloudddp.errors import CloudDDPError


def capacity(console: Console, *, days: str, as_json: bool) -> None:
    """Print it. Raises CloudDDPError if no region answers, or none offers a type."""
    session = start_session(console)
    spec, clouds = session.settings.cluster, session.account.clouds()
    instance_types.require_known_types(clouds[0], spec)
    found = survey(clouds, spec, int(days))
    if as_json:
        console.print_json(msgspec.to_builtins(found))
    else:
        console.print_text("\n\n".join(map(view.place, found)))
    if all(place.vcpus_needed is None for place in found):
        raise CloudDDPError("nothing is known of the type in these regions", hint="the reasons are above")
