"""Text that no answer can carry is refused before any call keeps it.

EC2's answers are XML 1.0, which has no way to write most control characters: one of them in a tag would make every
later answer that shows the tag unreadable. Knows parameters only as text, and not what they mean.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from cloudddp.sim.ec2.patch import wrap

_UNSAYABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def install() -> None:
    """Look at the parameters of every call of EC2's."""
    from moto.ec2.responses._base_response import EC2BaseResponse

    wrap(EC2BaseResponse, "call_action", _check)


def _check(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any) -> Any:
        from moto.core.responses import ActionResult
        from moto.ec2.exceptions import EC2ClientError

        bad = next((found for found in _texts(self.params) if _UNSAYABLE.search(found[1])), None)
        if bad is None:
            return original(self)
        name, text = bad
        error = EC2ClientError(
            "InvalidParameterValue",
            f"Value ({text!a}) for parameter {name} is invalid. It contains characters that are not allowed.",
        )
        status, headers, body = self.serialized(ActionResult(error))
        return status, {**headers, "status": str(status)}, body

    return call


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in the parameters, with the name of the parameter that holds it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, name)
