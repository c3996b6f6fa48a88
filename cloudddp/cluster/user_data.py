"""The user data of a node: its first host key and its deadline, as a cloud-config.

The id and the keys of a cluster are made here; all else depends on the arguments, the units and the script in
infra/node, and the time scale.

bootcmd arms the deadline: runcmd comes after multi-user.target, so a boot that hangs would never reach it.
bootcmd runs before sysinit.target, where `shutdown -P +N` fails, since that is a D-Bus call to logind and no
bus is up. A systemctl of root needs none: it connects to /run/systemd/private (systemd,
bus_connect_transport_systemd), and cloud-init itself calls `systemctl daemon-reload` in that stage
(cc_mounts). A link in timers.target.wants would take effect at the next boot only, because this boot's jobs
are planned already, so the timer is started; without --no-block, systemctl could wait for a job that waits
for cloud-init. The units have DefaultDependencies=no: they wait for no target. Nothing in user data helps
against a boot that hangs before cloud-init has the network.

runcmd enables the timer, for later boots, and `up` checks it over SSH. cloud-init runs BOOT_CHECK at every
boot, which shuts down a node that boots after its deadline: a timer that is first started after its time
never fires, nor does one that fired just before a reboot, nor one whose stamp a wrong clock put into the
future. The last command runs it again, for a deadline that passes before the timer is armed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudddp.config import timing
from cloudddp.files import payload_text
from cloudddp.ssh.target import generate_key

TIMER = "/etc/systemd/system/cloudddp-deadline.timer"
SERVICE = "/etc/systemd/system/cloudddp-deadline.service"
BOOT_CHECK = "/var/lib/cloud/scripts/per-boot/cloudddp-deadline"
IDLE_TIMER = "/etc/systemd/system/cloudddp-idle.timer"
IDLE_SERVICE = "/etc/systemd/system/cloudddp-idle.service"
IDLE_CHECK = "/etc/cloudddp/idle.sh"
APT_SETTINGS = "/etc/apt/apt.conf.d/99cloudddp"
NEVER = 1e9  # seconds

_APT = """\
DPkg::Lock::Timeout "600";
APT::Periodic::Enable "0";
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The id and the keys of one cluster. The private host key is in the user data only: every
    process on a node can read it there, so each node replaces it before any rank runs (host_keys.py)."""

    cluster_id: str
    public_key: str
    host_private: str
    host_public: str


def new_identity() -> tuple[Identity, str]:
    """Return the id and keys of a new cluster, and the private login key, which stays on this computer."""
    login, host = generate_key(), generate_key()
    cluster_id = "c-" + secrets.token_hex(5)
    identity = Identity(cluster_id, f"{login.public} cloudddp-{cluster_id}", host.private, host.public)
    return identity, login.private


def idle_files(minutes: float, ssh_port: int) -> list[dict[str, str]]:
    """Return the files that end a node that has been unused for so many minutes (0: never), or for the grace
    of a job with --down, as entries of write_files: a timer, its service and a shell script."""
    limits = timing.current()
    seconds = limits.minute * minutes or NEVER
    values = {
        "@IDLE@": seconds,
        "@EVERY@": max(min(limits.look, seconds / 4), 1.0),
        "@ALIVE@": max(limits.dead, 2.0),
        "@PORT@": ssh_port,
    }
    found = []
    for path, kind in ((IDLE_TIMER, "timer"), (IDLE_SERVICE, "service"), (IDLE_CHECK, "sh")):
        text = payload_text(f"infra/node/cloudddp-idle.{kind}")
        for name, value in values.items():
            text = text.replace(name, f"{value:.0f}")
        found.append({"path": path, "permissions": "0644", "content": text})
    return found


def plan_command(user: str, job: str, seconds: float) -> list[str]:
    """Return the entry of runcmd that gives a replacement the plan of the nodes that stay: the login user's
    poweroff.json, which the job's agent replaces (infra/node/agent/jobs/poweroff.py)."""
    text = json.dumps({"job": job, "seconds": float(seconds)})
    script = f'cd ~{user} && install -d -m 700 -o {user} .cloudddp && echo "$1" > .cloudddp/poweroff.json'
    return ["sh", "-c", f"{script} && chown {user} .cloudddp/poweroff.json", "sh", text]


def user_data(
    identity: Identity,
    created: datetime,
    expires: datetime,
    idle_minutes: float = 0.0,
    ssh_port: int = 22,
    commands: Sequence[list[str]] = (),
) -> str:
    """Return the cloud-config that installs the first host key of a node, arms its deadline, and ends it when
    it is idle (idle_files, armed by runcmd, not during the boot; `commands` come first).

    It contains no other secret, and that key is worthless once the node is ready. After the first line it is
    JSON, which is YAML with every value quoted. cloud-init writes the host key before sshd starts (unit order
    of cloud-init-network), and once per instance (cc_ssh: PER_INSTANCE), so the key that replaced it survives
    a reboot.

    APT_SETTINGS lets apt-get wait for dpkg's lock, and keeps apt-daily.service, which runs
    unattended-upgrades after the first boot, from taking it and the lock of the package lists, for which
    apt-get never waits.
    """
    deadline = expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lifetime = str(int((expires - created).total_seconds()))
    texts = (payload_text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    timer, service = (u.replace("@DEADLINE@", deadline).replace("@LIFETIME@", lifetime) for u in texts)
    late = (
        f'[ "$(date +%s)" -lt {int(expires.timestamp())} ] || systemctl start --no-block '
        "cloudddp-deadline.service"
    )
    check = f"#!/bin/sh\n{late}\n"
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": identity.host_private, "ed25519_public": identity.host_public},
        "bootcmd": [
            _unless_it_exists(TIMER, timer),
            _unless_it_exists(SERVICE, service),
            ["systemctl", "daemon-reload"],
            ["systemctl", "start", "--no-block", "cloudddp-deadline.timer"],
        ],
        "write_files": [
            {"path": APT_SETTINGS, "permissions": "0644", "content": _APT},
            {"path": BOOT_CHECK, "permissions": "0755", "content": check},
            *idle_files(idle_minutes, ssh_port),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", "cloudddp-deadline.timer"],
            *commands,
            ["systemctl", "enable", "--now", "cloudddp-idle.timer"],
            ["sh", BOOT_CHECK],
        ],
    }
    return "#cloud-config\n" + json.dumps(config, indent=1) + "\n"


def _unless_it_exists(path: str, text: str) -> str:
    """Return a command for bootcmd, which runs at every boot, that creates a file once: it may be changed."""
    return f"[ -e {path} ] || cat > {path} <<'END'\n{text.rstrip()}\nEND"
