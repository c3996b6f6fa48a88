"""The order of a boot: cloud-init's network stage, sysinit.target, sshd, cloud-init's last stage.

As on Ubuntu: cloud-init-network.service (bootcmd, write_files, host keys) is ordered before sysinit.target,
so nothing that waits for that target runs yet: no D-Bus and no logind, but systemd itself answers root on
/run/systemd/private. sshd comes after it, and cloud-final.service (runcmd, scripts) last. Timers run from the
beginning.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cloud_init, log, on_node, services
from .sshd import Sshd

NOLOGIN = Path("/run/nologin")
# What systemd-tmpfiles writes during the boot; systemd-user-sessions.service removes it
# (tmpfiles.d/systemd-nologin.conf).
_NOLOGIN_TEXT = (
    "System is booting up. Unprivileged users are not permitted to log in yet. Please come back later."
)
DPKG_LOCK = Path("/var/lib/dpkg/lock-frontend")
_reached_sysinit = threading.Event()


def has_bus() -> bool:
    """Return whether D-Bus and logind are up."""
    return _reached_sysinit.is_set()


def run(manager: services.Services, ssh: Sshd, report: int, chown_to_user: Callable[..., None]) -> None:
    """Boot the node. An error before sshd runs ends the node, and is written to the descriptor `report`."""
    facts = on_node.facts()
    wanted = facts.get("boot", {})
    config = facts.get("cloud_config", {})
    try:
        cloud_init.early(config, facts.get("login_keys", []), chown_to_user=chown_to_user)
        _reached_sysinit.set()
        manager.start_enabled()
        if wanted.get("nologin_seconds"):
            NOLOGIN.write_text(f"{_NOLOGIN_TEXT}\n")
        time.sleep(wanted.get("ssh_seconds", 0))
        if problem := ssh.start():
            raise RuntimeError(problem)
        os.close(report)
    except Exception as error:
        os.write(report, str(error).encode(errors="replace")[:2000])
        os._exit(1)
    _later(_end_nologin, wanted.get("nologin_seconds", 0))
    _later(_hold_dpkg_lock, wanted.get("apt_lock_seconds", 0))
    time.sleep(wanted.get("final_seconds", 0))
    cloud_init.late(config, facts.get("script", ""))


def _later(action: Callable[[float], Any], seconds: float) -> None:
    if seconds:
        threading.Thread(target=action, args=(seconds,), daemon=True).start()


def _end_nologin(seconds: float) -> None:
    time.sleep(seconds)
    NOLOGIN.unlink(missing_ok=True)


def _hold_dpkg_lock(seconds: float) -> None:
    """Hold the lock that apt takes first, as unattended-upgrades does in the minutes after the first boot."""
    try:
        with DPKG_LOCK.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            time.sleep(seconds)
    except OSError as error:
        log.write(f"{DPKG_LOCK}: {error}")
