"""Key pairs: one of a name in an account and region, and deleted by name or by id.

moto looks for the name and keeps the new pair in two steps, of which two requests may both do the first. And it knows
DeleteKeyPair by name only, so that one by id deletes nothing and says that it has.

Sources: EC2 API reference, DeleteKeyPair (parameters KeyName and KeyPairId, neither required by itself; "Return: Is
true if the request succeeds, and an error otherwise") and "Error codes" (InvalidKeyPair.Duplicate: "The key pair name
already exists in that Region"; InvalidKeyPair.NotFound). A name that does not exist is no error
(https://github.com/boto/boto3/issues/865); whether an id that does not exist is one is not documented, here it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.patch import LOCK, refuse, wrap


def install() -> None:
    """Make moto's calls on key pairs exclusive, and teach DeleteKeyPair ids."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.responses.key_pairs import KeyPairs

    for name in ("create_key_pair", "import_key_pair", "delete_key_pair"):
        wrap(EC2Backend, name, _one_at_a_time)
    wrap(KeyPairs, "delete_key_pair", _by_id)


def _one_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return original(*args, **kwargs)

    return call


def _by_id(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete(self: Any) -> Any:
        wanted, name = self._get_param("KeyPairId"), self._get_param("KeyName")
        if not wanted:
            if not name:
                refuse("MissingParameter", "The request must contain the parameter KeyName or KeyPairId")
            return original(self)
        self.error_on_dryrun()
        with LOCK:
            pairs = list(self.ec2_backend.key_pairs.values())
            found = next((pair for pair in pairs if pair.id == wanted), None)
            if found is None or (name and found.key_name != name):
                refuse("InvalidKeyPair.NotFound", f"The key pair '{wanted}' does not exist")
            self.ec2_backend.delete_key_pair(found.key_name)
        from moto.core.responses import ActionResult

        return ActionResult({"Return": True, "KeyPairId": wanted})

    return delete
