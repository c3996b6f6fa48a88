"""What holds for every call of EC2: one at a time, tags within the limits and looked up directly, no
characters that XML cannot represent.

moto is served by many threads and has no locks of its own: two concurrent calls may both find a name unused,
and a Describe call may find an instance whose state is set and whose reason is not. For each resource, moto
matches every tag of the account against a pattern, so that listing a few hundred instances takes seconds.
EC2's responses are XML 1.0, which excludes most control characters: one of them in a tag would make every
later response that includes the tag invalid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cloudddp.simulator.ec2 import interfaces
from cloudddp.simulator.ec2.patch import LOCK, client_error, invalid_value, override, wrap

_MOST = 50
_LONGEST_KEY, _LONGEST_VALUE = 127, 256  # characters, in the service model of EC2 (2016-11-15)
_RESERVED = "aws:"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def install() -> None:
    from moto.ec2.models.core import TaggedEC2Resource
    from moto.ec2.responses._base_response import EC2BaseResponse
    from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix

    def get_tags(self: Any) -> list[dict[str, str]]:
        own = self.ec2_backend.tags.get(self.id, {}) if self.id else {}
        kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if own else ""
        return [
            {"resource_id": self.id, "key": key, "value": value, "resource_type": kind}
            for key, value in own.items()
        ]

    wrap(TaggedEC2Resource, "get_tags", lambda _: get_tags)
    override(EC2BaseResponse, "call_action", _call)


def _call(original: Callable[..., Any], self: Any) -> Any:
    """Check the parameters of a call before it has any effect."""
    from moto.core.responses import ActionResult
    from moto.ec2.exceptions import EC2ClientError

    try:
        if not self._get_action().startswith(("Describe", "Delete")):
            for tags in _tag_lists(self.params):
                _check_tags(tags)
        _check_characters(self.params)
    except EC2ClientError as error:
        status, headers, body = self.serialized(ActionResult(error))
        return status, {**headers, "status": str(status)}, body
    with LOCK:
        interfaces.release_ended(self.ec2_backend)
        return original(self)


def _tag_lists(params: Any) -> Iterator[list[Any]]:
    """Yield the tags of each resource that a request tags."""
    for name in ("TagSpecification", "TagSpecifications"):
        for item in params.get(name) or []:
            yield item.get("Tags") or []
    if isinstance(params.get("Tags"), list):
        yield params["Tags"]


def _check_tags(tags: list[Any]) -> None:
    """Limits: Amazon EC2 User Guide, "Tag your Amazon EC2 resources"; TagLimitExceeded: API reference, "Error
    codes". The sentence about reserved keys is that of EC2
    (github.com/kubernetes-sigs/cluster-api-provider-aws/pull/5461).
    """
    if len(tags) > _MOST:
        client_error("TagLimitExceeded", "The maximum number of Tags for a resource has been reached.")
    for tag in tags:
        key, value = str(tag.get("Key") or ""), str(tag.get("Value") or "")
        if key.lower().startswith(_RESERVED):
            invalid_value(
                f"Value ( {key} ) for parameter key is invalid. Tag keys starting with 'aws:' are reserved "
                "for internal use"
            )
        if not 0 < len(key) <= _LONGEST_KEY:
            invalid_value(f"Tag keys must have 1 to {_LONGEST_KEY} characters")
        if len(value) > _LONGEST_VALUE:
            invalid_value(f"Tag values must have at most {_LONGEST_VALUE} characters")


def _check_characters(value: Any, name: str = "") -> None:
    """Check every string in the parameters; `name` is that of its parameter."""
    if isinstance(value, str) and _NOT_XML.search(value):
        invalid_value(
            f"Value ({value!a}) for parameter {name} is invalid. It contains characters that are not allowed."
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_characters(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_characters(item, name)
