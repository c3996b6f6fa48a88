"""Amazon S3 for the nodes: moto's, for callers that have the credentials of a node's role and its
permissions.

The server listens in the lab's network, where packets of nodes reach it if their route and security groups
allow it. The errors are those of "Error responses" in the S3 API Reference; signatures are not verified.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from cloudddp.simulator.api.wsgi import Application, Call, Environ, StartResponse, read_call, respond
from cloudddp.simulator.ec2 import role_sessions
from cloudddp.simulator.ec2.catalog import ACCOUNT
from cloudddp.simulator.iam import denials
from cloudddp.simulator.iam.evaluate import Check, evaluate
from cloudddp.simulator.net.policy import S3, S3_PORT

_PATH = re.compile(r"/([^/]*)/?(.*)", re.DOTALL)
# Actions, resources, and condition keys for Amazon S3 (Service Authorization Reference).
_OF_OBJECT = {
    "PUT": "PutObject",
    "POST": "PutObject",
    "GET": "GetObject",
    "HEAD": "GetObject",
    "DELETE": "DeleteObject",
}
_OF_BUCKET = {"GET": "ListBucket", "HEAD": "ListBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}


class NodeS3Server(ThreadedWSGIServer):
    """Serves `application` to nodes. `is_node` says whether an address is that of an instance. Raises
    OSError."""

    def __init__(
        self, application: Application, is_node: Callable[[str], bool], handler: type[WSGIRequestHandler]
    ) -> None:
        self._is_node = is_node
        self._listener = socket.create_server((S3, S3_PORT), backlog=256)
        super().__init__(S3, S3_PORT, with_rules(application), handler, fd=self._listener.fileno())

    def verify_request(self, _request: Any, client_address: Any) -> bool:
        """Hook of socketserver, called before a thread is started for the connection."""
        return self._is_node(client_address[0])


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: int
    code: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()


def with_rules(application: Application) -> Application:
    """Return the application for S3 calls that the role of a node may make."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        refusal = _refusal(environ)
        if refusal is None:
            return application(environ, start_response)
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{refusal.code}</Code>'
            f"<Message>{escape(refusal.message)}</Message><RequestId>SIMULATED</RequestId></Error>"
        )
        # The body of the request is not read, and would be taken for the next request.
        headers = (("Connection", "close"), *refusal.headers)
        body = respond(start_response, refusal.status, "application/xml", text, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else body

    return serve


def _refusal(environ: Environ) -> _Refusal | None:
    call = read_call(environ)
    if call.service != "s3":
        return _Refusal(403, "AccessDenied", "Access Denied")
    session = role_sessions.session_with(call.key)
    if session is None:
        text = "The AWS Access Key Id you provided does not exist in our records."
        return _Refusal(403, "InvalidAccessKeyId", text)
    if environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "") != session.session_token:
        text = "The provided token is malformed or otherwise invalid."
        return _Refusal(400, "InvalidToken", text)
    if role_sessions.end_of(session) <= datetime.now(UTC):
        return _Refusal(400, "ExpiredToken", "The provided token has expired.")
    return _denied(environ, call, session)


def _denied(environ: Environ, call: Call, session: Any) -> _Refusal | None:
    """Return the refusal of a call that the role may not make, or that came to another region than the
    bucket's."""
    found = _PATH.fullmatch(environ.get("PATH_INFO", "/").encode("latin-1").decode("utf-8", "replace"))
    bucket, key = found.groups() if found else ("", "")
    prefix = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)).get("prefix")
    check = Check(
        f"s3:{_action(environ, key)}",
        f"arn:aws:s3:::{bucket}/{key}" if key else f"arn:aws:s3:::{bucket}",
        {} if key or prefix is None else {"s3:prefix": (prefix,)},
    )
    decision, region = evaluate(check, role_sessions.policy_of(session)), _region_of(bucket)
    if not decision.allowed:
        where = (("x-amz-bucket-region", region),) if region else ()
        return _Refusal(403, "AccessDenied", denials.reason(check, decision, session.arn), where)
    if region not in (None, call.region):
        text = (
            "The bucket you are attempting to access must be addressed using the specified endpoint. Please "
            "send all future requests to this endpoint."
        )
        return _Refusal(301, "PermanentRedirect", text, (("x-amz-bucket-region", str(region)),))
    return None


def _action(environ: Environ, key: str) -> str:
    method = environ["REQUEST_METHOD"]
    names = {name for name, _ in parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)}
    if not key:
        return _OF_BUCKET.get(method, "Unknown")
    if "uploadId" in names and method == "DELETE":
        return "AbortMultipartUpload"
    if "uploadId" in names and method == "GET":
        return "ListMultipartUploadParts"
    return _OF_OBJECT.get(method, "Unknown")


def _region_of(bucket: str) -> str | None:
    """Return the region of a bucket; None if there is none of that name."""
    from moto.s3.models import s3_backends

    found = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
    return None if found is None else str(found.region_name)
