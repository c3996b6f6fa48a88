"""The caller: the owner of what is created, and the address from which SSH comes. Read-only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError
from cloudddp.text import one_line

UNKNOWN_OWNER = "unknown"  # if STS returns no ARN
CHECKIP = "https://checkip.amazonaws.com"

# A role assumed without a session name: botocore and the SDKs generate a new name for each session.
_GENERATED = re.compile(r"(assumed-role/[^/]+)/(?:botocore-session|aws-sdk-[a-z-]+|aws-go-sdk)-[0-9]+")


def owner(aws: AWS) -> str:
    """Return the caller's identity in the form of the owner tag: the last part of the ARN, the same in every session."""
    return owner_of(aws.call("sts", "get_caller_identity"))


def owner_of(identity: Mapping[str, Any]) -> str:
    """Return the owner for an answer of GetCallerIdentity."""
    arn = str(identity.get("Arn", ""))
    found = one_line(arn.rsplit(":", 1)[-1])[:200]
    generated = _GENERATED.fullmatch(found)
    return (generated.group(1) if generated else found) or UNKNOWN_OWNER


def caller_block() -> str:
    """Return this computer's address as AWS sees it, as a /32 or /128 block.

    CLOUDDDP_CHECKIP_URL selects another service that returns the caller's address as text.
    """
    import urllib.request  # takes 11 ms, which `status` does not need

    url = os.environ.get("CLOUDDDP_CHECKIP_URL", CHECKIP)
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an http or https URL")
        # Without the proxy of the environment: SSH does not use it either.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=10) as answer:
            address = ip_address(answer.read(100).decode().strip())
    except (OSError, ValueError) as error:
        raise CloudDDPError(
            f"cannot find the address of this computer: {url}: {error}",
            hint="give it: --ssh-from 203.0.113.7/32 (or ssh_from in cloudddp.toml)",
        ) from None
    return f"{address}/{address.max_prefixlen}"
