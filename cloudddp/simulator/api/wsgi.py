"""WSGI requests and responses: types, a simple response, and who calls what in an AWS request.

A call is in EC2's and STS's query protocol, or in AWS's JSON protocol.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.client import responses
from typing import Any
from urllib.parse import parse_qsl

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

_MAX_BODY = 1 << 20  # bytes; EC2's limit is far lower
_MAX_PARAMETERS = 10_000
_CREDENTIAL = re.compile(r"Credential=([^/]*)/[0-9]*/([^/]*)/([^/]*)/aws4_request")
_READ = "cloudddp.call"


@dataclass(frozen=True, slots=True)
class Call:
    """One call; texts are '' if the request lacks them. `parameters` are flat: Tag.1.Key, with upper-case
    names.
    """

    key: str  # the caller's access key id
    service: str  # as requests are signed for: ec2, ssm, sts, pricing, servicequotas
    region: str
    action: str
    parameters: Mapping[str, str]
    is_json: bool


def read_call(environ: Environ) -> Call:
    """Return the call of a request, which can be read again."""
    if _READ not in environ:
        environ[_READ] = _read(environ)
    call: Call = environ[_READ]
    return call


def read_body(environ: Environ) -> bytes:
    """Return the request's body, which can be read again; b'' if it is longer than that of any API call."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if not 0 < length <= _MAX_BODY:
        return b""
    body = bytes(environ["wsgi.input"].read(length))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _read(environ: Environ) -> Call:
    credential = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    key, region, service = credential.groups() if credential else ("", "", "")
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        action = str(target).rpartition(".")[2]
        return Call(key, service, region, action, _flat_json(read_body(environ)), True)
    is_form = environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded")
    query = read_body(environ).decode("utf-8", "replace") if is_form else str(environ.get("QUERY_STRING", ""))
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        pairs = []
    parameters = {name[:1].upper() + name[1:]: value for name, value in pairs}
    return Call(key, service, region, parameters.get("Action", ""), parameters, False)


def _flat_json(body: bytes) -> dict[str, str]:
    """Return the texts of a JSON object: {"Names": ["a"]} is Names.1."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, list) and name.count(".") < 8:
            for number, item in enumerate(value, 1):
                add(f"{name}.{number}", item)
        elif isinstance(value, dict) and name.count(".") < 8:
            for key, item in value.items():
                add(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, (str, int, float)):
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)

    add("", found if isinstance(found, dict) else {})
    return flat


def respond(
    start_response: StartResponse,
    status: int,
    content_type: str,
    text: str,
    more: Iterable[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Respond with a text; `more` are further headers."""
    body = text.encode()
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), *more]
    start_response(f"{status} {responses.get(status, 'Error')}", headers)
    return [body]
