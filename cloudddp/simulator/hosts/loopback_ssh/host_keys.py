"""The host key of a loopback node, and the pipe by which the node's `sudo` has the server load a new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import asyncssh


def load(folder: Path, injected: str) -> Any:
    """Return the node's host key: at its first boot the key that user data injects, or a new one.

    It is kept over reboots and stops, as cloud-init keeps it. A second key is stored beside it for `sudo` to
    install; it is generated here, since a node has no ssh-keygen. Raises ValueError.
    """
    run = folder / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    current = run / "host_key"
    if not current.exists():
        for name, text in (("fresh_host_key", ""), ("host_key", injected)):
            key = _import(text) if text else asyncssh.generate_private_key("ssh-ed25519")
            for path, data in (
                (run / f"{name}.pub", key.export_public_key()),
                (run / name, key.export_private_key()),
            ):
                path.touch(mode=0o600)
                path.write_bytes(data)
    return _import(current.read_text())


def open_reload_pipe(folder: Path) -> int:
    """Create the named pipe, and return a descriptor that is readable when the host key has to be
    reloaded."""
    pipe = folder / "run" / "reload"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    # Open for writing as well: otherwise it is at EOF after each writer.
    return os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def public_data(line: str) -> bytes | None:
    """Return the key data of a line of authorized_keys, or None if it is invalid."""
    try:
        return bytes(asyncssh.import_public_key(line).public_data)
    except asyncssh.KeyImportError:
        return None


def _import(text: str) -> Any:
    try:
        return asyncssh.import_private_key(text)
    except asyncssh.KeyImportError as error:
        raise ValueError(f"cannot read the host key: {error}") from error
