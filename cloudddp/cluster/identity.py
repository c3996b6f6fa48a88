"""What is new in each cluster: its id, its keys, and the units that end its nodes."""

from __future__ import annotations

import secrets

from cloudddp import payload
from cloudddp.cluster.user_data import Identity, IdleGuard
from cloudddp.config import timing
from cloudddp.ssh import keys


def new_identity() -> tuple[Identity, str]:
    """Return the id and keys of a new cluster, and the private login key, which stays on this computer."""
    login, host = keys.generate(), keys.generate()
    cluster_id = "c-" + secrets.token_hex(5)
    identity = Identity(cluster_id, f"{login.public} cloudddp-{cluster_id}", host.private, host.public)
    return identity, login.private


def units() -> tuple[str, str]:
    """Return the texts of the deadline's systemd timer and service."""
    timer, service = (payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    return timer, service


def idle_guard(minutes: float, ssh_port: int) -> IdleGuard:
    """Return what ends nodes that are idle for so many minutes (0: never), or whose job was launched with --down."""
    timer, service, check = (
        payload.text(f"infra/node/cloudddp-idle.{kind}") for kind in ("timer", "service", "sh")
    )
    minute = timing.current().minute
    return IdleGuard(minute * minutes, minute, ssh_port, timer, service, check)
