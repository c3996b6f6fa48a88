"""A proxy in front of moto that delays, rejects, throttles or loses calls, as the conditions require.

It reads the action and the service of an AWS request, and serves the Pricing API, which moto lacks.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable

from cloudddp.simulator.api.wsgi import Application, Environ, StartResponse, read_body, read_call, respond
from cloudddp.simulator.conditions.store import Store
from cloudddp.simulator.ec2 import prices
from cloudddp.simulator.ec2.patch import xml_error


class ResponseLost(ConnectionError):
    """The connection was closed before the response. The server handles it like a client that
    disconnected."""


def with_conditions(application: Application, store: Store) -> Application:
    """Return the application with the conditions of `store` applied to its calls."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        call = read_call(environ)
        dry_run = call.parameters.get("DryRun", "").lower() == "true"
        outcome = store.call(call.action, region=call.region, dry_run=dry_run)
        if outcome.latency:
            time.sleep(outcome.latency)
        if rule := outcome.rejection:
            message = rule.message or f"{rule.code} (set by a condition of the simulator)"
            return error_response(environ, start_response, rule.status, rule.code, message)
        if outcome.lose:
            _discard_response(application, environ)
            _disconnect(environ)
        return application(environ, start_response)

    return serve


def with_pricing(application: Application) -> Application:
    """Return the application with GetProducts answered here."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if read_call(environ).action != "GetProducts":
            return application(environ, start_response)
        text = prices.answer(read_body(environ) or b"{}")
        return respond(start_response, 200, "application/x-amz-json-1.1", text)

    return serve


def error_response(
    environ: Environ, start_response: StartResponse, status: int, code: str, message: str
) -> Iterable[bytes]:
    """Respond with an error in the protocol of the request."""
    call = read_call(environ)
    if call.is_json:
        text = json.dumps({"__type": code, "message": message})
        return respond(start_response, status, "application/x-amz-json-1.1", text)
    text = xml_error(code, message)
    if call.service not in ("", "ec2"):  # only EC2 has an <Errors> element
        text = text.replace("<Response><Errors>", "<ErrorResponse>")
        text = text.replace("</Errors>", "").replace("</Response>", "</ErrorResponse>")
    return respond(start_response, status, "text/xml", text)


def _discard_response(application: Application, environ: Environ) -> None:
    """Run the request to its end."""
    response = application(environ, lambda *_: lambda _: None)
    for _ in response:
        pass
    if hasattr(response, "close"):
        response.close()


def _disconnect(environ: Environ) -> None:
    connection = environ.get("werkzeug.socket")
    if isinstance(connection, socket.socket):
        connection.shutdown(socket.SHUT_RDWR)
    raise ResponseLost("the response is lost, as a condition requires")
