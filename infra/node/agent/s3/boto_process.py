"""How processes that use boto3 are started: with a Python of the node that has it (the Deep Learning AMIs
have it in /opt/pytorch), and with credentials of the node's role only."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
from collections.abc import Iterable
from typing import Any

from agent.node import imds
from agent.node.commands import run_quietly

PYTHONS = ("/opt/pytorch/bin/python", "python3")  # after that of the ranks
HAS_BOTO3 = "import importlib.util; print('yes' if importlib.util.find_spec('boto3') else '')"
NO_CREDENTIALS = "the node has no credentials: no instance profile with a role is attached to it"
LOOK_SECONDS = 20.0  # for a Python to say whether it has boto3
KEPT = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
)


def candidates(own: Iterable[str]) -> list[str]:
    """Return the Pythons that are tried: those of the job, then the node's."""
    return list(dict.fromkeys([*own, *PYTHONS]))


def problem(own: Iterable[str], python: str) -> str:
    """Return why no such process can be started, '' if it can; `python`: what `find` has returned."""
    if not python:
        looked = ", ".join(candidates(own))
        return f'no Python on the node has boto3 (looked at {looked}); add "pip install boto3" to [setup] run'
    if not imds.address():
        return "this node has no instance metadata, and so no credentials of a role"
    return ""


def find(own: Iterable[str]) -> str:
    """Return a Python that has boto3, or ''."""
    for python in candidates(own):
        if run_quietly([python, "-E", "-c", HAS_BOTO3], LOOK_SECONDS).strip() == "yes":
            return python
    return ""


def command(python: str, word: str) -> list[str]:
    """Return the command that runs a part of this agent (`upload`, `download`) with that Python."""
    return [python, "-E", "-X", "utf8", os.path.abspath(sys.argv[0]), word]


def region() -> str:
    """Return this node's region: S3 answers there, and names the region of another bucket."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        return imds.Metadata(imds.address()).get("placement/region")[0] or "us-east-1"
    return "us-east-1"


def environment() -> dict[str, str]:
    """Return the variables of such a process: credentials come from the node's role only."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_") or name in KEPT}
    address = imds.address()
    found = {
        **own,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_V1_DISABLED": "true",
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "3",
        "AWS_METADATA_SERVICE_TIMEOUT": "2",
    }
    if address != imds.ADDRESS:
        found["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://{address}/"
    return found


def client(region: str, *, attempts: int, connections: int, connect: float, read: float) -> Any:
    """Return a client of S3, in such a process."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=connect,
        read_timeout=read,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=connections,
    )
    return boto3.session.Session().client("s3", region_name=region, config=config)
