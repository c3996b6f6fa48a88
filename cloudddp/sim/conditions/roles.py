"""The conditions on credentials: roles with rules of their own, and AWS's clock."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

ARN = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]{1,512}")
_CODE = re.compile(r"[0-9]{6}")
_MAX_SECONDS = 43200  # STS's longest role session, 12 hours
_MAX_AHEAD = 86400


@dataclass(frozen=True, slots=True)
class Role:
    """The rules of one role.

    `codes`: those of the caller's MFA device, each valid once; None for a role that does not require MFA. `seconds`:
    the length of a session, of present ones too. `refuse`: nobody may assume it.
    """

    codes: tuple[str, ...] | None = None
    seconds: int | None = None
    refuse: bool = False

    def to_json(self) -> dict[str, Any]:
        codes = None if self.codes is None else list(self.codes)
        return {"codes": codes, "seconds": self.seconds, "refuse": self.refuse}


def read_role(_arn: str, value: Any) -> Role:
    """Return a role's rules from JSON. Raises ValueError with the reason."""
    if not isinstance(value, dict) or not value.keys() <= {"codes", "seconds", "refuse"}:
        raise ValueError('expected {"codes": ["123456"]}, with optional "seconds" and "refuse"')
    codes, seconds, refuse = value.get("codes"), value.get("seconds"), value.get("refuse", False)
    if codes is not None and not (
        isinstance(codes, list) and all(isinstance(code, str) and _CODE.fullmatch(code) for code in codes)
    ):
        raise ValueError(f"codes: expected a list of codes of 6 digits, not {json.dumps(codes)}")
    if seconds is not None and not _is_integer(seconds, 0, _MAX_SECONDS):
        raise ValueError(
            f"seconds: expected a whole number from 0 to {_MAX_SECONDS}, not {json.dumps(seconds)}"
        )
    if not isinstance(refuse, bool):
        raise ValueError(f"refuse: expected true or false, not {json.dumps(refuse)}")
    return Role(None if codes is None else tuple(codes), seconds, refuse)


def read_clock(_name: str, value: Any) -> int:
    """Return by how many seconds AWS's clock is ahead of this computer's. Raises ValueError with the reason."""
    if not _is_integer(value, -_MAX_AHEAD, _MAX_AHEAD):
        raise ValueError(
            f"expected whole seconds from -{_MAX_AHEAD} to {_MAX_AHEAD}, not {json.dumps(value)}"
        )
    return int(value)


def _is_integer(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
