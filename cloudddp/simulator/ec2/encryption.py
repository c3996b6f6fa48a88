"""KMS keys of volumes: which key a volume gets, and whether EC2 can use it.

EC2 checks the key after it has accepted a launch (API Reference, CreateVolume: "Amazon Web Services
authenticates the KMS key asynchronously. Therefore, if you specify an ID, alias, or ARN that is not valid,
the action can appear to complete, but eventually fails"): the instances go from pending to terminated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_may_use: ContextVar[Callable[[str], bool]] = ContextVar("may_use", default=lambda _arn: True)

# "If the reason is Client.InternalError: Client error on launch, that typically indicates that the root
# volume is encrypted and that you do not have permissions to access the KMS key for decryption" (Amazon EC2
# User Guide, "Troubleshoot instance launch issues").
NO_ACCESS = "Client.InternalError: Client error on launch"
# github.com/hashicorp/packer/issues/12683, github.com/CiscoDevNet/cloud-cml/issues/8
WRONG_STATE = "Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state"


def key_arn(backend: Any, key: str | None) -> str | None:
    """Return the ARN of a key given as id, alias or ARN, which EC2 shows; the text itself if there is no such
    key."""
    found = _find(backend, key) if key else None
    return str(found.arn) if found is not None else key


def launch_failure(instance: Any) -> str:
    """Return the state reason with which an instance ends because of a volume's key, or '' if every key is
    usable."""
    backend = instance.ec2_backend
    for mapping in instance.block_device_mapping.values():
        volume = backend.volumes.get(mapping.volume_id)
        if volume is None or not volume.encrypted or not volume.kms_key_id:
            continue
        key = _find(backend, volume.kms_key_id)
        # Amazon EBS supports only symmetric keys, of the volume's region.
        if key is None or key.key_spec != "SYMMETRIC_DEFAULT":
            return NO_ACCESS
        if key.key_state != "Enabled":
            return WRONG_STATE
        # The key policy of AWS's own key for EBS allows every user of the account.
        if key.arn != backend.default_kms_key_id and not _may_use.get()(str(key.arn)):
            return NO_ACCESS
    return ""


@contextlib.contextmanager
def key_access(may_use: Callable[[str], bool]) -> Iterator[None]:
    """For the length of the block, the caller may use the keys for whose ARN `may_use` returns True."""
    token = _may_use.set(may_use)
    try:
        yield
    finally:
        _may_use.reset(token)


def _find(backend: Any, name: str) -> Any | None:
    """Return moto's key in the region of an EC2 backend, or None."""
    from moto.kms.models import kms_backends

    region = name.split(":")[3] if name.startswith("arn:") and name.count(":") >= 5 else backend.region_name
    if region != backend.region_name:
        return None
    keys = kms_backends[backend.account_id][region]
    if name.startswith("alias/") or ":alias/" in name:
        alias = keys.get_alias_name(name)
        known = keys.get_key_id_from_alias(alias) if keys.alias_exists(alias) else None
    else:
        known = keys.get_key_id(name)
    return keys.keys.get(keys.get_key_id(known)) if known else None
