"""How SSH reaches the nodes: settings that contradict each other, and the tokens of proxy_command. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError

TOKENS: Mapping[str, str] = {
    "%h": "instance id",
    "%n": "instance id",
    "%a": "address",
    "%p": "port",
    "%r": "login user",
    "%%": "a percent sign",
}
"""What is replaced in proxy_command. ssh's own tokens but %a; with ssh, %h is the name that was given to it,
and AWS documents instance ids as names (`host i-* mi-*`)."""
_TOKEN = re.compile("%.?")
_SAFE = re.compile(r"[A-Za-z0-9_.:-]*")  # means the same inside quotes and outside


def check_connection(spec: ClusterSpec) -> None:
    """Raise UsageError for settings that contradict each other, and for an unknown token."""
    if spec.proxy_jump is not None and spec.proxy_command is not None:
        raise UsageError(
            "cluster.proxy_jump and cluster.proxy_command exclude each other",
            hint="leave out one of them; a command can use a jump host itself: ssh -W %a:%p HOST",
        )
    if spec.connect == "jump" and spec.proxy_jump is None:
        raise UsageError(
            'cluster.connect is "jump", but there is no jump host', hint='give proxy_jump = "user@host"'
        )
    if spec.connect not in (None, "jump") and spec.proxy_jump is not None:
        raise UsageError(
            f'cluster.connect is "{spec.connect}", but cluster.proxy_jump is set',
            hint='leave out one of them; proxy_jump means connect = "jump"',
        )
    port = re.search(r":(\d+)\Z", spec.proxy_jump or "")
    if port is not None and not 0 < int(port[1]) < 65536:
        raise UsageError(f"cluster.proxy_jump: no such port: {spec.proxy_jump}", hint="allowed: 1 to 65535")
    for token in _TOKEN.findall(spec.proxy_command or ""):
        if token not in TOKENS:
            known = ", ".join(f"{name} ({meaning})" for name, meaning in TOKENS.items())
            raise UsageError(f"cluster.proxy_command: unknown token {token}", hint=f"known: {known}")


def expand_proxy_command(command: str, values: Mapping[str, str]) -> str:
    """Return a proxy command with its tokens replaced. Raises ValueError for a value that a shell could
    misread.

    Values are not quoted: AWS's documented command has %h inside quotes.
    """
    for value in values.values():
        if not _SAFE.fullmatch(value):
            raise ValueError(f"cannot be part of a command: {value!r}")
    known = {**values, "%%": "%"}
    return _TOKEN.sub(lambda found: known[found.group()], command)
