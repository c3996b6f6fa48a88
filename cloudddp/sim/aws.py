"""What makes moto's EC2 good enough to rehearse on: the door to the rooms of ec2/, for all who need AWS in a process.

Used by the server and, in process, by `rehearse`. It changes moto once per process and starts nothing: nodes,
addresses that answer and states that take time belong to lifecycle.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from cloudddp.sim.control import HIDDEN
from cloudddp.sim.ec2 import (
    addresses,
    disks,
    filters,
    groups,
    images,
    interfaces,
    keypairs,
    launch,
    placement,
    power,
    rules,
    spot,
    tags,
    termination,
    texts,
)
from cloudddp.sim.ec2.catalog import gpus
from cloudddp.sim.ec2.limits import CONDITIONS
from cloudddp.sim.ec2.patch import LOCK, wrap

__all__ = ["CONDITIONS", "LOCK", "gpus", "prepare", "rehearse", "wrap"]

_prepared = False


def prepare() -> None:
    """Teach moto what AWS does and it does not; once per process, before any backend exists.

    Raises RuntimeError where the installed moto is not the one that the rooms of ec2/ were written for.
    """
    global _prepared
    if _prepared:
        return
    _validate()
    rooms = (
        images, disks, addresses, interfaces, groups, keypairs, rules, placement, spot, filters, launch, power,
        termination, texts, tags,
    )  # fmt: skip
    for room in rooms:
        room.install()
    _prepared = True


@contextlib.contextmanager
def rehearse() -> Iterator[None]:
    """AWS in this process: every boto3 call inside is answered by moto, instances run at once.

    Nothing is started, no credentials are needed, and the environment is as before on exit. The region is
    AWS_REGION's, or AWS_DEFAULT_REGION's, or us-east-1.
    """
    before = dict(os.environ)
    region = before.get("AWS_REGION") or before.get("AWS_DEFAULT_REGION") or "us-east-1"
    for name in (*HIDDEN, "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="rehearsal",
        AWS_SECRET_ACCESS_KEY="rehearsal",  # noqa: S106 (no secret: it says what it is)
        AWS_REGION=region,
        AWS_DEFAULT_REGION=region,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    try:
        import moto

        prepare()  # in this environment, too: moto's own imports ask boto3 for regions, which reads AWS_PROFILE
        with moto.mock_aws():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _validate() -> None:
    from moto import settings

    for name in ("ENABLE_AMI_VALIDATION", "EC2_ENABLE_INSTANCE_TYPE_VALIDATION", "ENABLE_KEYPAIR_VALIDATION"):
        wrap(settings, name, lambda _original: True)
