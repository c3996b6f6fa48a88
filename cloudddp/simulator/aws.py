"""AWS in this process: every boto3 call is answered by moto with EC2's rules, without a server and without
nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from cloudddp.simulator.control.environment import HIDDEN
from cloudddp.simulator.ec2 import catalog, install, reservations
from cloudddp.simulator.ec2.catalog import ACCOUNT, CONDITIONS
from cloudddp.simulator.ec2.speed import fast_imports

__all__ = ["CONDITIONS", "rehearse", "reserve"]


@contextlib.contextmanager
def rehearse(instance_profile: str = "") -> Iterator[None]:
    """Answer every boto3 call in the block; instances run at once.

    `instance_profile` is a name or ARN that exists in the account, or ''. Needs no credentials, and restores
    the environment on exit. The region is that of AWS_REGION or AWS_DEFAULT_REGION, or us-east-1.
    """
    before = dict(os.environ)
    region = before.get("AWS_REGION") or before.get("AWS_DEFAULT_REGION") or "us-east-1"
    for name in (*HIDDEN, "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="rehearsal",
        AWS_SECRET_ACCESS_KEY="rehearsal",  # noqa: S106 (not a secret)
        AWS_REGION=region,
        AWS_DEFAULT_REGION=region,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    try:
        with fast_imports():
            import moto

            # in this environment: moto's imports ask boto3 for regions, which reads AWS_PROFILE
            install.install()
        with moto.mock_aws():
            if instance_profile:
                _add_profile(instance_profile, region)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def reserve(name: str, *, instance_type: str, count: int, zone: str | None) -> str:
    """Add an on-demand capacity reservation with this id to the account of `rehearse`. Returns its zone.

    Without `zone` it is the first one that offers the type.
    """
    from moto.ec2.models import ec2_backends

    region = zone[:-1] if zone else os.environ["AWS_REGION"]
    chosen = zone or next(iter(catalog.zones(region, instance_type)), f"{region}a")
    reservations.assume(
        ec2_backends[ACCOUNT][region],
        name,
        instance_type=instance_type,
        count=count,
        zone=chosen,
    )
    return chosen


def _add_profile(profile: str, region: str) -> None:
    """Create an instance profile, given by name or ARN, in moto's account."""
    from moto.iam.models import iam_backends
    from moto.utilities.utils import get_partition

    is_arn = profile.startswith("arn:")
    path, _, name = (profile.partition(":instance-profile")[2] if is_arn else f"/{profile}").rpartition("/")
    backend = iam_backends[ACCOUNT][get_partition(region)]
    created = backend.create_instance_profile(name, f"{path}/", [])
    if is_arn:
        created.account_id = profile.split(":")[4]
