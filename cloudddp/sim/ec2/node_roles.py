"""The role of an instance: its temporary credentials, and what its policies are.

A node gets credentials of the role in its instance profile from the metadata service
(docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html). Reads moto's
associations of profiles, and the policies that are attached to roles.
"""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.sim.ec2 import role_sessions
from cloudddp.sim.iam import documents
from cloudddp.sim.iam.documents import Policy

_ACCOUNT = "123456789012"  # moto's default
_SECONDS = 6 * 3600  # for which credentials are valid; EC2's are about as long
_RENEWED = timedelta(minutes=5)  # before their end at the latest, as the guide says

_sessions: dict[tuple[str, str], Any] = {}  # (instance id, role) -> moto's AssumedRole
_lock = threading.Lock()


def profile_of(instance: Any) -> Any | None:
    """Return moto's instance profile of an instance, or None."""
    associations = instance.ec2_backend.iam_instance_profile_associations
    found = associations.get(instance.id)
    return None if found is None else found.iam_instance_profile


def role_of(instance: Any) -> Any | None:
    """Return moto's role of an instance, or None."""
    profile = profile_of(instance)
    return next(iter(profile.roles), None) if profile is not None else None


def session_of(instance: Any, role: Any) -> Any:
    """Return moto's session with the instance's credentials, a new one shortly before the last one ends."""
    with _lock:
        found = _sessions.get((instance.id, role.name))
        if found is None or role_sessions.end_of(found) <= datetime.now(UTC) + _RENEWED:
            found = _sessions[instance.id, role.name] = _assume(instance, role)
        return found


def _assume(instance: Any, role: Any) -> Any:
    from moto.sts.models import sts_backends
    from moto.utilities.utils import get_partition

    backend = sts_backends[_ACCOUNT][get_partition(instance.region_name)]
    return backend.assume_role(
        region_name=instance.region_name,
        role_session_name=instance.id,
        role_arn=role.arn,
        policy="",
        duration=_SECONDS,
        external_id="",
    )


def session_with(access_key: str) -> Any | None:
    """Return the session of an instance that has this access key, or None."""
    with _lock:
        return next((one for one in _sessions.values() if one.access_key_id == access_key), None)


def policy_of(session: Any) -> Policy:
    """Return what the policies of a session's role say together: those in the role, and those attached to
    it."""
    from moto.iam.models import iam_backends

    role = iam_backends[_ACCOUNT][session.partition].get_role_by_arn(session.role_arn)
    attached = [
        version.document
        for one in role.managed_policies.values()
        for version in one.versions
        if version.version_id == one.default_version_id
    ]
    texts = [*role.policies.values(), *attached]
    found = [documents.parse(one if isinstance(one, str) else json.dumps(one)) for one in texts]
    return Policy(tuple(statement for policy in found for statement in policy.statements))
