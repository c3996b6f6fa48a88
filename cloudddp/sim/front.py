"""What stands in front of moto and makes calls slow, refused, throttled or lost, as the conditions say.

WSGI on both sides. Knows an AWS request's action and service, and nothing of what the actions do. Pages of our own
(/_cloudddp/...) and moto's (/moto-api/...) pass untouched.
"""

from __future__ import annotations

import io
import json
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from cloudddp.sim.conditions import BadCondition, Rejection, Store
from cloudddp.sim.ec2.patch import xml_error

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]

PAGE = "/_cloudddp/conditions"
_OURS = ("/_cloudddp/", "/moto-api")
_MOST = 1 << 20  # bytes of a body that are read; EC2 takes far less
_SERVICE = re.compile(r"Credential=[^/]*/\d*/[^/]*/([^/]*)/aws4_request")
_REASONS = {400: "Bad Request", 403: "Forbidden", 500: "Internal Server Error", 503: "Service Unavailable"}


class AnswerLost(ConnectionError):
    """The connection was closed before the answer, which the server takes as a client that went away."""


def wrap(application: Application, store: Store) -> Application:
    """The application behind the conditions of `store`, and the page that sets them."""

    def answer(environ: Environ, start_response: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == PAGE:
            return _page(environ, start_response, store)
        if path.startswith(_OURS):
            return application(environ, start_response)
        verdict = store.verdict(_action(environ))
        if verdict.latency:
            time.sleep(verdict.latency)
        if verdict.refusal:
            return _refusal(environ, start_response, verdict.refusal)
        if verdict.lose:
            _run_to_the_end(application, environ)
            _hang_up(environ)
        return application(environ, start_response)

    return answer


def _page(environ: Environ, start_response: Start, store: Store) -> Iterable[bytes]:
    if environ["REQUEST_METHOD"] == "GET":
        return _json(start_response, store.read().to_json())
    if environ["REQUEST_METHOD"] != "POST":
        return _json(start_response, {"error": "GET or POST", "known": ["GET", "POST"]}, 405)
    try:
        return _json(start_response, store.update(json.loads(_body(environ) or b"null")).to_json())
    except BadCondition as error:
        return _json(start_response, {"error": str(error), "known": list(error.known)}, 400)
    except ValueError as error:
        return _json(start_response, {"error": f"no JSON: {error}", "known": []}, 400)


def _json(start_response: Start, answer: Any, status: int = 200) -> Iterable[bytes]:
    return _reply(start_response, status, "application/json", json.dumps(answer))


def _reply(start_response: Start, status: int, kind: str, text: str) -> Iterable[bytes]:
    body = text.encode()
    reason = "OK" if status == 200 else _REASONS.get(status, "Error")
    start_response(f"{status} {reason}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def _body(environ: Environ) -> bytes:
    """The request's body, which stays readable; empty where it is too long to be an API call's."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if not 0 < length <= _MOST:
        return b""
    body = bytes(environ["wsgi.input"].read(length))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _action(environ: Environ) -> str:
    """The API action a request asks for; '' where it is none of the two protocols that name one."""
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        return str(target).rpartition(".")[2]
    form = environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded")
    asked = _body(environ).decode("utf-8", "replace") if form else str(environ.get("QUERY_STRING", ""))
    return parse_qs(asked).get("Action", [""])[0]


def _refusal(environ: Environ, start_response: Start, rule: Rejection) -> Iterable[bytes]:
    message = rule.message or f"{rule.code} (set by a condition of the simulator)"
    if environ.get("HTTP_X_AMZ_TARGET"):
        answer = json.dumps({"__type": rule.code, "message": message})
        return _reply(start_response, rule.status, "application/x-amz-json-1.1", answer)
    service = _SERVICE.search(environ.get("HTTP_AUTHORIZATION", ""))
    if service is None or service[1] == "ec2":
        return _reply(start_response, rule.status, "text/xml", xml_error(rule.code, message))
    text = xml_error(rule.code, message).replace("<Response><Errors>", "<ErrorResponse>")
    return _reply(
        start_response,
        rule.status,
        "text/xml",
        text.replace("</Errors>", "").replace("</Response>", "</ErrorResponse>"),
    )


def _run_to_the_end(application: Application, environ: Environ) -> None:
    answer = application(environ, lambda *_: lambda _: None)
    for _ in answer:
        pass
    if hasattr(answer, "close"):
        answer.close()


def _hang_up(environ: Environ) -> None:
    connection = environ.get("werkzeug.socket")
    if isinstance(connection, socket.socket):
        connection.shutdown(socket.SHUT_RDWR)
    raise AnswerLost("the answer is lost, as a condition wants it")
