"""A proxy in front of moto that delays, rejects, throttles or loses calls, as the conditions require.

It reads the action and the service of an AWS request. Requests to /_cloudddp/... and /moto-api/... pass unchanged.
"""

from __future__ import annotations

import io
import json
import re
import socket
import time
from collections.abc import Iterable
from urllib.parse import parse_qs

from cloudddp.sim.api.wsgi import Application, Environ, StartResponse, respond
from cloudddp.sim.conditions.model import Rejection
from cloudddp.sim.conditions.store import Store
from cloudddp.sim.ec2.patch import xml_error

_NOT_AWS = ("/_cloudddp/", "/moto-api")
_MAX_BODY = 1 << 20  # bytes; EC2's limit is far lower
_SERVICE = re.compile(r"Credential=[^/]*/\d*/[^/]*/([^/]*)/aws4_request")


class ResponseLost(ConnectionError):
    """The connection was closed before the response. The server handles it like a client that disconnected."""


def with_conditions(application: Application, store: Store) -> Application:
    """Return the application with the conditions of `store` applied to its calls."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO", "").startswith(_NOT_AWS):
            return application(environ, start_response)
        outcome = store.call(_action(environ))
        if outcome.latency:
            time.sleep(outcome.latency)
        if outcome.rejection:
            return _reject(environ, start_response, outcome.rejection)
        if outcome.lose:
            _discard_response(application, environ)
            _disconnect(environ)
        return application(environ, start_response)

    return serve


def read_body(environ: Environ) -> bytes:
    """Return the request's body, which can be read again; b'' if it is longer than that of any API call."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if not 0 < length <= _MAX_BODY:
        return b""
    body = bytes(environ["wsgi.input"].read(length))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _action(environ: Environ) -> str:
    """Return the action of a request in AWS's JSON or query protocol, or ''."""
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        return str(target).rpartition(".")[2]
    is_form = environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded")
    query = read_body(environ).decode("utf-8", "replace") if is_form else str(environ.get("QUERY_STRING", ""))
    return parse_qs(query).get("Action", [""])[0]


def _reject(environ: Environ, start_response: StartResponse, rule: Rejection) -> Iterable[bytes]:
    """Respond with an error in the protocol of the request."""
    message = rule.message or f"{rule.code} (set by a condition of the simulator)"
    if environ.get("HTTP_X_AMZ_TARGET"):
        text = json.dumps({"__type": rule.code, "message": message})
        return respond(start_response, rule.status, "application/x-amz-json-1.1", text)
    text = xml_error(rule.code, message)
    service = _SERVICE.search(environ.get("HTTP_AUTHORIZATION", ""))
    if service is not None and service[1] != "ec2":  # only EC2 has an <Errors> element
        text = text.replace("<Response><Errors>", "<ErrorResponse>")
        text = text.replace("</Errors>", "").replace("</Response>", "</ErrorResponse>")
    return respond(start_response, rule.status, "text/xml", text)


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
