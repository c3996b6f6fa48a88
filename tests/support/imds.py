"""A metadata service on 127.0.0.1, for agents that a test runs on this computer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.web import Handler, Server


class Metadata(Server):
    """A metadata service of version 2: `found` maps names to texts."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {"events/maintenance/scheduled": "[]"}
        self.looks = 0
        super().__init__(_Handler)

    def announce(self, seconds: float, action: str = "terminate") -> datetime:
        """As AWS announces that it takes a spot instance in so many seconds; return when."""
        ends = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)
        notice = {"action": action, "time": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}
        self.found["spot/instance-action"] = json.dumps(notice)
        return ends


class _Handler(Handler, BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        ttl = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if ttl == "21600" else 400, "secret")

    def do_GET(self) -> None:
        text = self.server.found.get(self.path.removeprefix("/latest/meta-data/"))
        known = self.headers["X-aws-ec2-metadata-token"] == "secret"
        self.answer(401 if not known else 404 if text is None else 200, text or "")
        self.server.looks += 1


def of_a_role() -> dict[str, str]:
    """What a node with a role finds in its metadata."""
    credentials = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": "ASIAROLE",
        "SecretAccessKey": "s3cret-of-the-role",
        "Token": "token-of-the-role",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": f"{datetime.now(UTC) + timedelta(hours=6):%Y-%m-%dT%H:%M:%SZ}",
    }
    return {
        "placement/region": "us-east-1",
        "iam/security-credentials/": "role",
        "iam/security-credentials/role": json.dumps(credentials),
    }


@contextmanager
def given_a_role(node: Any, s3_url: str) -> Iterator[None]:
    """Give an agent's node (support/agentnode.py) a role, and an S3."""
    metadata = Metadata()
    metadata.found |= of_a_role()
    node.metadata = metadata.address
    node.variables["AWS_ENDPOINT_URL_S3"] = s3_url
    yield
    metadata.close()
