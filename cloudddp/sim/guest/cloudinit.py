"""A small cloud-init: the directives that launchers use, in cloud-init's order, once per instance as there.

`early` runs before sshd answers (keys, files, bootcmd), `late` after (runcmd, a user-data script). A directive
that is not known is named in the log and in `cloud-init status --long`, as something a real machine would do.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import children, here

USER = "ubuntu"
LOG = Path("/var/log/cloud-init-output.log")
ONCE = Path("/var/lib/cloud/instance")  # a folder of marks: what was done for this instance
PER_BOOT = Path("/var/lib/cloud/scripts/per-boot")  # programs for every boot, not only the first
STATUS = Path("/run/cloud-init/status.json")
KNOWN = {  # obeyed, or already so on every node
    "bootcmd", "disable_root", "manage_etc_hosts", "preserve_hostname", "runcmd", "ssh_authorized_keys",
    "ssh_deletekeys", "ssh_genkeytypes", "ssh_keys", "users", "write_files",
}  # fmt: skip
_DEFERRED = ("true", "1", "yes")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}  # no HOME


def early(config: dict[str, Any], keys: list[str], *, user: Callable[..., None]) -> None:
    """Everything up to the moment when sshd starts. `user` makes files the login user's."""
    here.require()
    STATUS.parent.mkdir(exist_ok=True)
    _say({"status": "running", "errors": [], "ignored": ignored(config)})
    if config.get("bootcmd"):
        _attempt("bootcmd", lambda: _run_script("bootcmd", shellify(config["bootcmd"])))
    if _first("write_files"):
        _write_files(config, deferred=False)
    _attempt("ssh_keys", lambda: _host_keys(config))
    if _first("authorized_keys"):
        every = [*keys, *_strings(config.get("ssh_authorized_keys")), *_user_keys(config)]
        _attempt("ssh_authorized_keys", lambda: _authorize(every, user))


def late(config: dict[str, Any], script: str) -> None:
    """What cloud-init's last stage runs, and then the end of it all."""
    here.require()
    if _first("write_files_deferred"):
        _write_files(config, deferred=True)
    for path in sorted(PER_BOOT.glob("*")):
        if os.access(path, os.X_OK):
            _attempt(f"scripts_per_boot: {path.name}", functools.partial(_run, path))
    if config.get("runcmd") and _first("runcmd"):
        _attempt("runcmd", lambda: _run_script("runcmd", shellify(config["runcmd"])))
    if script and _first("script"):
        _attempt("user script", lambda: _run_script("part-001", script))
    known = json.loads(STATUS.read_text())
    _say({**known, "status": "error" if known["errors"] else "done"})
    (ONCE / "boot-finished").write_text(time.strftime("%a, %d %b %Y %H:%M:%S +0000\n", time.gmtime()))


def ignored(config: dict[str, Any]) -> list[str]:
    """The directives that a real machine would obey, and users that it would make, and a simulated one does not."""
    users = [one.get("name") if isinstance(one, dict) else one for one in _list(config.get("users"))]
    return sorted(
        {*set(config) - KNOWN, *(f"users: {name}" for name in users if name not in (USER, "default"))}
    )


def shellify(commands: Any) -> str:
    """One shell script of all commands, as cloud-init makes it: a string is a line of shell, a list a program.

    So `cd` and variables last to the end, and the exit code is the last command's. Raises TypeError.
    """
    lines = ["#!/bin/sh"]
    for command in _list(commands):
        if isinstance(command, list):
            lines.append(" ".join("'{}'".format(str(word).replace("'", "'\\''")) for word in command))
        elif isinstance(command, str):
            lines.append(command)
        elif command is not None:
            raise TypeError(f"a command is a string or a list, not {command!r}")
    return "\n".join(lines) + "\n"


def status(arguments: list[str]) -> int:
    """`cloud-init status [--wait] [--long]`, with cloud-init's words and exit codes."""
    here.require()
    if arguments[:1] != ["status"]:
        print("cloud-init (simulated): only `status [--wait] [--long]`", file=sys.stderr)
        return 2
    while True:
        known = json.loads(STATUS.read_text()) if STATUS.exists() else {"status": "not started"}
        if "--wait" not in arguments or known["status"] in ("done", "error"):
            break
        time.sleep(0.05)
    print(f"status: {known['status']}")
    if {"--long", "-l"} & set(arguments):
        print("detail: simulated by cloudddp")
        for word in ("errors", "ignored"):
            print(f"{word}: {known.get(word, [])}")
    return 1 if known["status"] == "error" else 0


def _say(known: dict[str, Any]) -> None:
    fresh = STATUS.with_suffix(".new")
    fresh.write_text(json.dumps(known))
    fresh.replace(STATUS)


def _first(what: str) -> bool:
    """True once in the life of the instance: a stopped one that starts again keeps what it was given."""
    ONCE.mkdir(parents=True, exist_ok=True)
    try:
        (ONCE / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _attempt(what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        LookupError,
        EOFError,
        subprocess.SubprocessError,
    ) as error:
        _note(what, f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))


def _note(what: str, problem: str) -> None:
    with contextlib.suppress(OSError), LOG.open("a") as log:  # on a full disk the status still shows it
        log.write(f"{what}: {problem}\n")
    known = json.loads(STATUS.read_text())
    _say({**known, "errors": [*known["errors"], f"{what}: {problem}"]})


def _run_script(name: str, text: str) -> None:
    """Run it to its end; output goes to cloud-init's log."""
    folder = ONCE / "scripts"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / name, text.encode(errors="surrogateescape"), 0o700)
    _run(folder / name)


def _run(path: Path) -> None:
    with LOG.open("ab") as log:
        children.run(
            [str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            env={**_ENVIRONMENT, "INSTANCE_ID": here.facts()["instance_id"]},
        )  # fmt: skip


def _host_keys(config: dict[str, Any]) -> None:
    """The keys that the user data holds, or else a new one; a spoiled one would leave the node without sshd."""
    folder = Path("/etc/ssh")
    given = config.get("ssh_keys")
    if _first("ssh_keys") and isinstance(given, dict):
        for kind in ("ed25519", "ecdsa", "rsa"):
            if given.get(f"{kind}_private"):
                _host_key(folder / f"ssh_host_{kind}_key", str(given[f"{kind}_private"]))
    if not list(folder.glob("ssh_host_*_key")):
        new = folder / "ssh_host_ed25519_key"
        children.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(new)])


def _host_key(path: Path, private: str) -> None:
    _write(path, private.strip().encode() + b"\n", 0o600)
    public = children.run(
        ["ssh-keygen", "-y", "-f", str(path)], check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if public.returncode:
        path.unlink()
        _note("ssh_keys", f"{path.name} in the user data is no private key")
        return
    _write(path.with_suffix(".pub"), public.stdout, 0o644)


def _authorize(keys: list[str], user: Callable[..., None]) -> None:
    path = Path(f"/home/{USER}/.ssh/authorized_keys")
    _write(path, "".join(f"{key}\n" for key in dict.fromkeys(keys) if key).encode(), 0o600)
    user(path)


def _user_keys(config: dict[str, Any]) -> list[str]:
    mine = [one for one in _list(config.get("users")) if isinstance(one, dict) and one.get("name") == USER]
    return [key for one in mine for key in _strings(one.get("ssh_authorized_keys"))]


def _write_files(config: dict[str, Any], *, deferred: bool) -> None:
    for entry in _list(config.get("write_files")):
        if not isinstance(entry, dict):
            if not deferred:
                _attempt("write_files", functools.partial(_refuse, f"not a file's description: {entry!r}"))
        elif (str(entry.get("defer", "")).lower() in _DEFERRED) == deferred:
            _attempt("write_files", functools.partial(_write_file, entry))


def _refuse(why: str) -> None:
    raise TypeError(why)


def _write_file(entry: dict[str, Any]) -> None:
    if "source" in entry:
        raise ValueError(f"{entry.get('path')}: a source is not fetched on a simulated node")
    path, text = Path(str(entry["path"])), content(entry)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    before = path.read_bytes() if entry.get("append") and path.exists() else b""
    _write(path, before + text, permissions(entry.get("permissions")))
    owner, _, group = str(entry.get("owner", "")).partition(":")
    if owner:
        shutil.chown(path, owner, group or None)


def content(entry: dict[str, Any]) -> bytes:
    """What a file of write_files is to hold. Raises ValueError, OSError, EOFError for what cannot be decoded."""
    raw = str(entry.get("content", "")).encode()
    encoding = (
        str(entry.get("encoding") or "text/plain").lower().replace("gzip", "gz").replace("base64", "b64")
    )
    if encoding not in ("text/plain", "b64", "gz", "gz+b64"):
        raise ValueError(f"{entry.get('path')}: encoding {encoding} is not known")
    if encoding.endswith("b64"):
        raw = base64.b64decode(raw)
    return gzip.decompress(raw) if encoding.startswith("gz") else raw


def permissions(given: Any) -> int:
    """The mode that write_files means: a number, or the octal digits of one; 0644 where it is not said."""
    if given is None:
        return 0o644
    return given if isinstance(given, int) else int(str(given), 8)


def _write(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(data)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [str(one).strip() for one in _list(value)]
