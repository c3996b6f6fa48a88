"""Answers metadata requests: session tokens, the instance's metadata options, and look-ups in its tree."""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import unquote

from cloudddp.simulator.metadata.tree import Notice, find, tree_of

MAX_TTL = 21600  # seconds that a token may be valid
MAX_HOPS = 64
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105  a header name

Headers = Mapping[str, str] | Message  # case-insensitive


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    hops: int = MAX_HOPS  # TTL of the IP packets


class Metadata:
    """`find_instance` returns moto's Instance with a private address, or None."""

    def __init__(self, find_instance: Callable[[str], Any | None], notices: Mapping[str, Notice]) -> None:
        self._find_instance = find_instance
        self._notices = notices
        self._secret = secrets.token_bytes(32)

    def is_instance(self, address: str) -> bool:
        """Return whether an instance has this private address."""
        return self._find_instance(address) is not None

    def respond(self, method: str, path: str, headers: Headers, address: str) -> Response | None:
        """Return the response for the instance at `address`, or None if there is none."""
        instance = self._find_instance(address)
        if instance is None:
            return None
        options = instance.metadata_options
        if options.http_endpoint == "disabled":
            return Response(403)
        path = unquote(path.partition("?")[0])
        if path.strip("/") == "latest/api/token":
            if method != "PUT":
                return Response(405, headers=(("Allow", "PUT"),))
            return self._create_token(instance, headers)
        if method not in ("GET", "HEAD"):
            return Response(405, headers=(("Allow", "GET, HEAD"),))
        token, ttl = headers.get(_TOKEN_HEADER), 0
        if token is not None and not (ttl := self._remaining_ttl(instance, token)):
            return Response(401)
        if token is None and options.http_tokens == "required":
            return Response(401)
        found = find(tree_of(instance, self._notices.get(instance.id)), path)
        if found is None:
            return Response(404)
        return Response(200, found, ((_TTL_HEADER, str(ttl)),) if token is not None else ())

    def _create_token(self, instance: Any, headers: Headers) -> Response:
        if headers.get("X-Forwarded-For") is not None:  # as EC2 does: an open proxy must not get a token
            return Response(403)
        ttl = headers.get(_TTL_HEADER) or ""
        if not ttl.isdecimal() or not 1 <= int(ttl) <= MAX_TTL:
            return Response(400)
        # Signed instead of stored: 8 bytes of time and 32 of signature give 56 characters, as EC2's tokens
        # have.
        expires = int(time.time() + int(ttl)).to_bytes(8, "big")
        token = base64.urlsafe_b64encode(expires + self._sign(instance, expires))
        # The hop limit keeps it, by default, out of containers behind a bridge.
        hops = min(max(instance.metadata_options.http_put_response_hop_limit, 1), MAX_HOPS)
        return Response(200, token, ((_TTL_HEADER, ttl),), hops)

    def _sign(self, instance: Any, expires: bytes) -> bytes:
        return hmac.digest(self._secret, instance.id.encode() + expires, "sha256")

    def _remaining_ttl(self, instance: Any, token: str) -> int:
        """Return for how many seconds the token is still valid for this instance; 0 if it is not."""
        try:
            raw = base64.urlsafe_b64decode(token.encode())
        except ValueError:
            return 0
        if not hmac.compare_digest(raw[8:], self._sign(instance, raw[:8])):
            return 0
        return max(0, int.from_bytes(raw[:8], "big") - int(time.time()))
