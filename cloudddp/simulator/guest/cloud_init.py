"""A small cloud-init: the directives that launchers use, in cloud-init's order and once per instance.

`early` runs before sshd starts (keys, files, bootcmd), `late` afterwards (runcmd, a user-data script).
Unsupported directives are listed in `cloud-init status --long`.
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

from . import child_processes, on_node

USER = "ubuntu"
LOG = Path("/var/log/cloud-init-output.log")
INSTANCE_FOLDER = Path("/var/lib/cloud/instance")  # has a marker file for each step done for this instance
PER_BOOT = Path("/var/lib/cloud/scripts/per-boot")  # programs to run at every boot
STATUS = Path("/run/cloud-init/status.json")
# Keys of the configuration that are handled, or whose default is that of every node.
SUPPORTED = frozenset(
    """
        bootcmd disable_root manage_etc_hosts preserve_hostname runcmd ssh_authorized_keys ssh_deletekeys
        ssh_genkeytypes ssh_keys users write_files
    """.split()
)
_TRUE = ("true", "1", "yes")


def early(config: dict[str, Any], keys: list[str], *, chown_to_user: Callable[..., None]) -> None:
    """Run the stages before sshd starts. `chown_to_user` gives files to the login user."""
    on_node.require()
    STATUS.parent.mkdir(exist_ok=True)
    _write_status({"status": "running", "errors": [], "ignored": ignored(config)})
    if config.get("bootcmd"):
        _attempt("bootcmd", lambda: _run_script("bootcmd", shellify(config["bootcmd"])))
    if _first_time("write_files"):
        _write_files(config, deferred=False)
    _attempt("ssh_keys", lambda: _install_host_keys(config))
    if _first_time("authorized_keys"):
        all_keys = [*keys, *_strings(config.get("ssh_authorized_keys")), *_user_keys(config)]
        _attempt("ssh_authorized_keys", lambda: _authorize(all_keys, chown_to_user))


def late(config: dict[str, Any], script: str) -> None:
    """Run cloud-init's final stage, and record the result."""
    on_node.require()
    if _first_time("write_files_deferred"):
        _write_files(config, deferred=True)
    for path in sorted(PER_BOOT.glob("*")):
        if os.access(path, os.X_OK):
            _attempt(f"scripts_per_boot: {path.name}", functools.partial(_run, path))
    if config.get("runcmd") and _first_time("runcmd"):
        _attempt("runcmd", lambda: _run_script("runcmd", shellify(config["runcmd"])))
    if script and _first_time("script"):
        _attempt("user script", lambda: _run_script("part-001", script))
    current = json.loads(STATUS.read_text())
    _write_status({**current, "status": "error" if current["errors"] else "done"})
    finished = time.strftime("%a, %d %b %Y %H:%M:%S +0000\n", time.gmtime())
    (INSTANCE_FOLDER / "boot-finished").write_text(finished)


def ignored(config: dict[str, Any]) -> list[str]:
    """Return the directives and users that a real machine would apply and a simulated node does not."""
    users = [one.get("name") if isinstance(one, dict) else one for one in _list(config.get("users"))]
    other_users = {f"users: {name}" for name in users if name not in (USER, "default")}
    return sorted({*config} - SUPPORTED | other_users)


def shellify(commands: Any) -> str:
    """Return one shell script for all commands, as cloud-init does: a string is a line of shell, a list an
    argv.

    `cd` and variables therefore last to the end, and the exit code is that of the last command. Raises
    TypeError.
    """
    lines = ["#!/bin/sh"]
    for command in _list(commands):
        if isinstance(command, list):
            lines.append(" ".join("'{}'".format(str(word).replace("'", "'\\''")) for word in command))
        elif isinstance(command, str):
            lines.append(command)
        elif command is not None:
            raise TypeError(f"a command must be a string or a list, not {command!r}")
    return "\n".join(lines) + "\n"


def status(arguments: list[str]) -> int:
    """The command `cloud-init status [--wait] [--long]`, with cloud-init's output and exit codes."""
    on_node.require()
    if arguments[:1] != ["status"]:
        print("cloud-init (simulated node): supported: status [--wait] [--long]", file=sys.stderr)
        return 2
    while True:
        current = json.loads(STATUS.read_text()) if STATUS.exists() else {"status": "not started"}
        if "--wait" not in arguments or current["status"] in ("done", "error"):
            break
        time.sleep(0.05)
    print(f"status: {current['status']}")
    if {"--long", "-l"} & set(arguments):
        print("detail: simulated by cloudddp")
        for key in ("errors", "ignored"):
            print(f"{key}: {current.get(key, [])}")
    return 1 if current["status"] == "error" else 0


def _write_status(current: dict[str, Any]) -> None:
    temporary = STATUS.with_suffix(".new")
    temporary.write_text(json.dumps(current))
    temporary.replace(STATUS)


def _first_time(step: str) -> bool:
    """Return True once in the life of the instance: a stopped instance that starts again keeps its files."""
    INSTANCE_FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        (INSTANCE_FOLDER / step).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _attempt(step: str, action: Callable[[], None]) -> None:
    """Run one step; a failure is recorded and does not end the boot, as in cloud-init."""
    try:
        action()
    except (OSError, ValueError, LookupError, TypeError, EOFError, subprocess.SubprocessError) as error:
        _record_error(step, f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))


def _record_error(step: str, problem: str) -> None:
    with contextlib.suppress(OSError), LOG.open("a") as log:  # on a full disk, the status still shows it
        log.write(f"{step}: {problem}\n")
    current = json.loads(STATUS.read_text())
    _write_status({**current, "errors": [*current["errors"], f"{step}: {problem}"]})


def _run_script(name: str, text: str) -> None:
    """Run a script and wait for it; its output goes to cloud-init's log."""
    folder = INSTANCE_FOLDER / "scripts"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / name, text.encode(errors="surrogateescape"), 0o700)
    _run(folder / name)


def _run(path: Path) -> None:
    with LOG.open("ab") as log:
        child_processes.run(
            [str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**on_node.ENVIRONMENT, "INSTANCE_ID": on_node.facts()["instance_id"]},
        )


def _install_host_keys(config: dict[str, Any]) -> None:
    """Install the keys of the user data, or generate one; with none that is valid, sshd would not start."""
    folder = Path("/etc/ssh")
    given = config.get("ssh_keys")
    if _first_time("ssh_keys") and isinstance(given, dict):
        for kind in ("ed25519", "ecdsa", "rsa"):
            if given.get(f"{kind}_private"):
                _install_host_key(folder / f"ssh_host_{kind}_key", str(given[f"{kind}_private"]))
    if not list(folder.glob("ssh_host_*_key")):
        path = folder / "ssh_host_ed25519_key"
        child_processes.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)])


def _install_host_key(path: Path, private: str) -> None:
    _write(path, private.strip().encode() + b"\n", 0o600)
    public = child_processes.run(
        ["ssh-keygen", "-y", "-f", str(path)],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if public.returncode:
        path.unlink()
        _record_error("ssh_keys", f"{path.name} in the user data is not a valid private key")
        return
    _write(path.with_suffix(".pub"), public.stdout, 0o644)


def _authorize(keys: list[str], chown_to_user: Callable[..., None]) -> None:
    path = Path(f"/home/{USER}/.ssh/authorized_keys")
    _write(path, "".join(f"{key}\n" for key in dict.fromkeys(keys) if key).encode(), 0o600)
    chown_to_user(path)


def _user_keys(config: dict[str, Any]) -> list[str]:
    entries = [one for one in _list(config.get("users")) if isinstance(one, dict) and one.get("name") == USER]
    return [key for one in entries for key in _strings(one.get("ssh_authorized_keys"))]


def _write_files(config: dict[str, Any], *, deferred: bool) -> None:
    for entry in _list(config.get("write_files")):
        is_deferred = isinstance(entry, dict) and str(entry.get("defer", "")).lower() in _TRUE
        if is_deferred == deferred:
            _attempt("write_files", functools.partial(_write_file, entry))


def _write_file(entry: Any) -> None:
    if not isinstance(entry, dict):
        raise TypeError(f"expected a mapping, got {entry!r}")
    if "source" in entry:
        raise ValueError(f"{entry.get('path')}: `source` is not supported on a simulated node")
    path, data = Path(str(entry["path"])), content(entry)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    before = path.read_bytes() if entry.get("append") and path.exists() else b""
    _write(path, before + data, permissions(entry.get("permissions")))
    owner, _, group = str(entry.get("owner", "")).partition(":")
    if owner:
        shutil.chown(path, owner, group or None)


def content(entry: dict[str, Any]) -> bytes:
    """Return the decoded content of an entry of write_files. Raises ValueError, OSError, EOFError."""
    raw = str(entry.get("content", "")).encode()
    encoding = (
        str(entry.get("encoding") or "text/plain").lower().replace("gzip", "gz").replace("base64", "b64")
    )
    if encoding not in ("text/plain", "b64", "gz", "gz+b64"):
        raise ValueError(f"{entry.get('path')}: unknown encoding {encoding}")
    if encoding.endswith("b64"):
        raw = base64.b64decode(raw)
    return gzip.decompress(raw) if encoding.startswith("gz") else raw


def permissions(value: Any) -> int:
    """Return the file mode for `permissions` of write_files: a number, or octal digits; 0644 by default."""
    if value is None:
        return 0o644
    return value if isinstance(value, int) else int(str(value), 8)


def _write(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(data)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [str(one).strip() for one in _list(value)]
