"""The instance metadata service, version 2."""

from __future__ import annotations

import http.client
import os
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

ADDRESS = "169.254.169.254"
# Another address of the metadata service, for simulated nodes; empty: there is none.
VARIABLE = "CLOUDDDP_METADATA"
TIMEOUT = 2.0  # seconds for an answer
TOKEN_SECONDS = 21600  # for which a token is valid: the longest time that the service allows
MAX_ANSWER = 1 << 16  # bytes


def address() -> str:
    """Return the address of the service, '' where there is none."""
    return os.environ.get(VARIABLE, ADDRESS)


class Metadata:
    """A client with a token of its own."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = ""
        self._token_until = 0.0

    def get(self, name: str) -> tuple[str, datetime]:
        """Return what has this name, and the service's time. Raises OSError, HTTPException, ValueError."""
        if time.monotonic() > self._token_until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            self._token, _ = self._call("PUT", "/latest/api/token", headers)
            self._token_until = time.monotonic() + TOKEN_SECONDS / 2
        return self._call("GET", f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})

    def _call(self, method: str, path: str, headers: dict[str, str]) -> tuple[str, datetime]:
        connection = http.client.HTTPConnection(self._host, timeout=TIMEOUT)  # without any proxy
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER).decode()
            if answer.status not in (200, 404):
                self._token_until = 0.0
                raise OSError(f"{path}: {answer.status}")
            date = answer.getheader("Date")
            now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
            return (body if answer.status == 200 else ""), now
        finally:
            connection.close()
