"""Rejects parameters with characters that XML cannot represent.

EC2's responses are XML 1.0, which excludes most control characters: one of them in a tag would make every
later response that includes the tag invalid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cloudddp.sim.ec2.patch import error_response, override

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def install() -> None:
    """Check the parameters of every EC2 call."""
    from moto.ec2.responses._base_response import EC2BaseResponse

    override(EC2BaseResponse, "call_action", _check)


def _check(original: Callable[..., Any], self: Any) -> Any:
    from moto.ec2.exceptions import EC2ClientError

    invalid = next((found for found in _texts(self.params) if _NOT_XML.search(found[1])), None)
    if invalid is None:
        return original(self)
    name, text = invalid
    error = EC2ClientError(
        "InvalidParameterValue",
        f"Value ({text!a}) for parameter {name} is invalid. It contains characters that are not allowed.",
    )
    return error_response(self, error)


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in the parameters, with the name of its parameter."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, name)
