"""moto looks up the methods of a class for every request, and lists its own folder for every host name: a third of the
time of a small call. They do not change, so they are looked up once."""

from __future__ import annotations

import functools

from cloudddp.sim.ec2.patch import wrap


def install() -> None:
    from moto.core import responses

    wrap(responses, "method_names_from_class", functools.cache)


def install_in_server() -> None:
    """Patch moto's server as well, which a rehearsal does not import."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    wrap(DomainDispatcherApplication, "get_backend_for_host", functools.lru_cache(maxsize=64))
