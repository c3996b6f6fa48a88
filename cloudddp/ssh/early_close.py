"""A server that accepts connections and closes them before its SSH banner: one reason for nodes and jump
hosts. Pure."""

from __future__ import annotations

_MARK = "the server closed the connection before its SSH banner"

PENALTIES = (
    "sshd may refuse this address for a while (PerSourcePenalties, OpenSSH 9.8 and newer): something behind "
    "the same address probes port 22 or fails logins; wait some minutes (10 at most by default), or connect "
    "from another address"
)


def text(line: str) -> str:
    """Return the text of an exception for a connection that was closed after this line, or after none
    ('')."""
    return f"{_MARK}, after {line.strip()!r}" if line.strip() else _MARK


def reason_in(error: BaseException) -> str:
    """Return that text, if it is in the message of an exception (paramiko adds its own); else ''."""
    if isinstance(error, ConnectionResetError):  # while TCP connects
        return _MARK
    _, found, rest = str(error).partition(_MARK)
    return found + rest
