"""The user's known_hosts files, read as OpenSSH reads them (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"), and
never written.

paramiko's reader ignores @revoked, and accepts only the first of several keys of one type. Certificates are
not supported.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

FILES = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
_MAX_BYTES = 16 << 20


class Verdict(Enum):
    """What the files say about the key that a host presents."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class _Entry:
    names: str
    kind: str  # of the key, such as ssh-ed25519
    key: str  # base64
    revoked: bool

    def matches(self, host: str) -> bool:
        if self.names.startswith("|1|"):
            return _hashed(self.names, host)
        patterns = self.names.split(",")
        if any(fnmatch.fnmatchcase(host, _literal(p[1:])) for p in patterns if p.startswith("!")):
            return False
        return any(fnmatch.fnmatchcase(host, _literal(p)) for p in patterns)


class KnownHosts:
    """All lines of the files that have the form of an entry; others are ignored."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        for name in FILES:
            try:
                with Path(name).expanduser().open("rb") as file:
                    text = file.read(_MAX_BYTES).decode(errors="replace")
            except OSError:  # it does not exist
                continue
            self._entries += [entry for line in text.splitlines() if (entry := _parse(line))]

    def types(self, host: str) -> list[str]:
        """Return the types of a host's keys, in the order of the files."""
        found = [one.kind for one in self._entries if not one.revoked and one.matches(host)]
        return list(dict.fromkeys(found))

    def verdict(self, host: str, kind: str, key: str) -> Verdict:
        """Return what is known about a key, given by its type and base64."""
        entries = [one for one in self._entries if one.matches(host)]
        same = [one for one in entries if (one.kind, one.key) == (kind, key)]
        if any(one.revoked for one in same):
            return Verdict.REVOKED
        if same:
            return Verdict.KNOWN
        return Verdict.CHANGED if any(not one.revoked for one in entries) else Verdict.UNKNOWN


def _parse(line: str) -> _Entry | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
        return None
    return _Entry(words[0], words[1], words[2], bool(marker))


def _literal(pattern: str) -> str:
    """Return a pattern for fnmatch: OpenSSH's has * and ?, but brackets stand for themselves
    (`[host]:port`)."""
    return pattern.lower().replace("[", "[[]")


def _hashed(field: str, host: str) -> bool:
    try:
        _, _, salt, digest = field.split("|")
        expected = base64.b64decode(digest)
        found = hmac.new(base64.b64decode(salt), host.encode(), hashlib.sha1).digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(found, expected)
