"""Key pairs: a pair is deleted by name or by id. moto implements DeleteKeyPair by name only; by id it deletes
nothing and reports success.

Sources: EC2 API reference, DeleteKeyPair (parameters KeyName and KeyPairId, neither required by itself;
"Return: Is true if the request succeeds, and an error otherwise") and "Error codes"
(InvalidKeyPair.NotFound). A name that does not exist is not an error
(https://github.com/boto/boto3/issues/865); whether an id that does not exist is one is not documented, here
it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2.patch import client_error, override, result


def install() -> None:
    """Add KeyPairId to DeleteKeyPair."""
    from moto.ec2.responses.key_pairs import KeyPairs

    override(KeyPairs, "delete_key_pair", _delete_by_id)


def public_key(instance: Any) -> str:
    """Return the public key of the pair that an instance was launched with, or ''."""
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    material = pair.material_public if pair else ""
    return (material.decode() if isinstance(material, bytes) else str(material)).strip()


def _delete_by_id(original: Callable[..., Any], self: Any) -> Any:
    pair_id, name = self._get_param("KeyPairId"), self._get_param("KeyName")
    if not pair_id:
        if not name:
            client_error("MissingParameter", "The request must contain the parameter KeyName or KeyPairId")
        return original(self)
    self.error_on_dryrun()
    pairs = list(self.ec2_backend.key_pairs.values())
    found = next((pair for pair in pairs if pair.id == pair_id), None)
    if found is None or (name and found.key_name != name):
        client_error("InvalidKeyPair.NotFound", f"The key pair '{pair_id}' does not exist")
    self.ec2_backend.delete_key_pair(found.key_name)
    return result(Return=True, KeyPairId=pair_id)
