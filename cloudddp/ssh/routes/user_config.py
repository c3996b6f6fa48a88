"""The user's own SSH configuration, for a jump host: name, port, user and keys as `ssh -J` would use them."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudddp.errors import UsageError
from cloudddp.ssh import paramiko_fixes
from cloudddp.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

_GIVEN = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")
_MATCH_EXEC = re.compile(r"^\s*match\b.*\bexec\b", re.IGNORECASE | re.MULTILINE)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True, slots=True)
class JumpHost:
    """A jump host. `given` is the setting; `keys` are the private keys that the configuration names for
    it."""

    given: str
    host: str
    port: int
    user: str
    keys: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"jump host {self.user}@{self.host} port {self.port}"

    @property
    def known_as(self) -> str:
        """Its name in a known_hosts file."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def ssh(self) -> tuple[str, ...]:
        """The words after `ssh` that log in to it; ssh reads the same configuration again."""
        user, host, port = split(self.given)
        return (*(("-p", str(port)) if port else ()), f"{user}@{host}" if user else host)


def split(given: str) -> tuple[str, str, int | None]:
    """Return user ('' if not given), host and port (None if not given) of `[user@]host[:port]`."""
    found = _GIVEN.fullmatch(given)
    if found is None:
        raise ValueError(f"not a jump host: {given!r}")
    return found["user"] or "", found["host"].strip("[]"), int(found["port"]) if found["port"] else None


def jump_host(given: str) -> JumpHost:
    """Return the jump host that a setting names. Raises UsageError if ~/.ssh/config cannot be used for it."""
    user, host, port = split(given)
    found = _lookup(host)
    for option in ("proxyjump", "proxycommand"):
        if str(found.get(option, "none")).lower() != "none":
            raise UsageError(
                f"{_config_file()} has a {option} for {host}: cloudddp connects through one jump host only",
                hint=f'let ssh do it: proxy_command = "ssh -W %a:%p {one_line(given)}" instead of proxy_jump',
            )
    keys = found.get("identityfile", [])
    name = str(found.get("hostname") or host)
    if not _is_host_name(name):
        where = (
            f"HostName of {one_line(host, 100)} in ~/.ssh/config" if name != host else "cluster.proxy_jump"
        )
        raise UsageError(
            f"{where}: {one_line(name, 100)!r} is not a host name",
            hint="give a DNS name, whose parts have 1 to 63 characters each, or an address",
        )
    return JumpHost(
        given=given,
        host=name,
        port=port or _port(found.get("port")),
        user=user or str(found.get("user") or "") or _require_local_user(host),
        keys=tuple(str(key) for key in keys if Path(key).expanduser().is_file()),
    )


def _is_host_name(name: str) -> bool:
    """Return whether the name can be looked up: Python encodes it as IDNA for that."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return one_line(name) == name


def _local_user() -> str | None:
    """Return this user's name; None without an entry in the user database, as in many containers, and without
    USER."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return None


def _require_local_user(host: str) -> str:
    if (found := _local_user()) is None:
        raise UsageError(
            f"cannot find the user name to log in to jump host {one_line(host, 100)} with: this process's "
            "user id has no "
            "name",
            hint="give it: --proxy-jump USER@HOST, `User` in ~/.ssh/config, or the variable USER",
        )
    return found


@contextlib.contextmanager
def _user_name_for_paramiko() -> Iterator[None]:
    """Let paramiko, which looks the local user up also where nothing refers to it, find the user id as
    name."""
    if _local_user() is not None:
        yield
        return
    os.environ["LOGNAME"] = str(os.getuid())
    try:
        yield
    finally:
        del os.environ["LOGNAME"]


def openssh_files() -> list[str]:
    """Return the options of `ssh` for the files that are used here, where they are not its own defaults.

    OpenSSH looks in the home folder of the user database, Python and paramiko in HOME.
    """
    folder = Path("~/.ssh").expanduser()
    with contextlib.suppress(KeyError):  # no entry for this user
        if folder.parent == Path(pwd.getpwuid(os.getuid()).pw_dir):
            return []
    config = _config_file()
    found = [
        "-F",
        str(config) if config.is_file() else "none",
        "-o",
        f"UserKnownHostsFile={folder / 'known_hosts'}",
    ]
    for name in _DEFAULT_KEYS:
        if (folder / name).is_file():
            found += ["-i", str(folder / name)]
    return found


def _config_file() -> Path:
    return Path("~/.ssh/config").expanduser()


def _lookup(host: str) -> dict[str, Any]:
    paramiko_fixes.load()
    import paramiko

    path = _config_file()
    try:
        if not path.is_file():
            return {}
        text = path.read_text(errors="replace")
        if _MATCH_EXEC.search(text):  # paramiko would run the commands, with this process's stdin
            raise ValueError("it has `Match exec`, which cloudddp does not run")
        with _user_name_for_paramiko():
            return dict(paramiko.SSHConfig.from_text(text).lookup(host))
    except (OSError, ValueError, ImportError, paramiko.SSHException, paramiko.ConfigParseError) as error:
        raise UsageError(
            f"cannot read {path}, which may have settings for the jump host {host}: "
            f"{one_line(str(error), 200)}",
            hint='let ssh read it: proxy_command = "ssh -W %a:%p HOST" instead of proxy_jump',
        ) from None


def _port(text: object) -> int:
    try:
        return int(str(text or 22))
    except ValueError:
        return 22
