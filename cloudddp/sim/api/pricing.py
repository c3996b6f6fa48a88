"""Serves the Pricing API, which moto lacks: see ec2/prices.py."""

from __future__ import annotations

from collections.abc import Iterable

from cloudddp.sim.api.wsgi import Application, Environ, StartResponse, read_body, read_call, respond
from cloudddp.sim.ec2 import prices


def with_pricing(application: Application) -> Application:
    """Return the application with GetProducts answered here."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if read_call(environ).action != "GetProducts":
            return application(environ, start_response)
        text = prices.answer(read_body(environ) or b"{}")
        return respond(start_response, 200, "application/x-amz-json-1.1", text)

    return serve
