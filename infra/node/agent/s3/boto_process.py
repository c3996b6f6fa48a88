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
CONNECT_SECONDS = 10.0
PART = 16 << 20  # bytes; files of that size and more go in parts
CONNECTIONS = 32  # and as many requests that wait for one: each has its file open
KEPT = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
)


class CannotStart(OSError):
    """No such process can be started; the text says why."""


def command(own: Iterable[str], word: str) -> list[str]:
    """Return the command that runs a part of this agent (`upload`, `download`) with a Python that has boto3:
    one of the job's `own`, or the node's. Raises CannotStart."""
    pythons = list(dict.fromkeys([*own, *PYTHONS]))
    for python in pythons:
        if run_quietly([python, "-E", "-c", HAS_BOTO3], LOOK_SECONDS).strip() == "yes":
            if not imds.address():
                raise CannotStart("this node has no instance metadata, and so no credentials of a role")
            return [python, "-E", "-X", "utf8", os.path.abspath(sys.argv[0]), word]
    looked = ", ".join(pythons)
    raise CannotStart(
        f'no Python on the node has boto3 (looked at {looked}); add "pip install boto3" to [setup] run'
    )


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


def manager(seconds: float, attempts: int) -> Any:
    """Return a TransferManager of s3transfer, in such a process. `seconds`: for an answer of S3, which is
    asked in this node's region, and names the region of another bucket; `attempts`: for one request."""
    import boto3
    from botocore.config import Config
    from s3transfer.manager import TransferConfig, TransferManager

    region = ""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        region, _ = imds.Metadata(imds.address()).get("placement/region")
    config = Config(
        connect_timeout=min(CONNECT_SECONDS, seconds),
        read_timeout=seconds,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=CONNECTIONS,
    )
    client = boto3.session.Session().client("s3", region_name=region or "us-east-1", config=config)
    return TransferManager(
        client, TransferConfig(PART, PART, CONNECTIONS, max_request_queue_size=CONNECTIONS)
    )
