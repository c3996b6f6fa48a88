"""Instance profiles that exist in a rehearsal, which has no account to find them in."""

from __future__ import annotations

_ACCOUNT = "123456789012"  # moto's default


def add(profile: str, region: str) -> None:
    """Create an instance profile, given by name or ARN, in moto's account."""
    from moto.iam.models import iam_backends
    from moto.utilities.utils import get_partition

    is_arn = profile.startswith("arn:")
    path, _, name = (profile.partition(":instance-profile")[2] if is_arn else f"/{profile}").rpartition("/")
    backend = iam_backends[_ACCOUNT][get_partition(region)]
    created = backend.create_instance_profile(name, f"{path}/", [])
    if is_arn:
        created.account_id = profile.split(":")[4]
