"""What a machine node has beyond Debian 13: the login user of its image (for Amazon Linux its groups and
Python, too), the hypervisor UUID by which cloud-init recognizes EC2, and the conditions of its boot.

It is written to a new disk once, before the first boot. Standard library only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from cloudddp.simulator.guest import on_node

# What cloud-init's generator (ds-identify) reads: the list of data sources has to be one line.
_CLOUD_INIT = """\
datasource_list: [Ec2]
datasource:
  Ec2:
    metadata_urls: ["http://169.254.169.254"]
network: {{config: disabled}}
apt: {{preserve_sources_list: true}}
system_info:
  default_user:
    name: {user}
    gecos: {user}
    uid: {uid}
    groups: [{groups}]
"""

# On Nitro, cloud-init recognizes EC2 by DMI data, which it does not read in a container. Xen instances show
# an identifier in /sys/hypervisor, which it does read (DataSourceEc2.py, identify_aws); only for EC2 does it
# use version 2 of the metadata service. Nothing can be added to /sys itself, so a copy is mounted over it.
# Its parts are read-only. It is not, since udevd, which cloud-init needs, would not start
# (ConditionPathIsReadWrite=/sys).
_PLATFORM = """\
[Unit]
Description=Imitate the hypervisor UUID of EC2
DefaultDependencies=no
Before=cloud-init-main.service cloud-init-local.service

[Service]
Type=oneshot
ExecStart=/bin/sh -ec 'mkdir /run/sys; mount -t tmpfs -o mode=755,size=64k tmpfs /run/sys; cd /sys; \
    for name in *; do mkdir /run/sys/$$name; mount --rbind $$name /run/sys/$$name; done; \
    mkdir /run/sys/hypervisor; echo ec2e1916-9099-7caf-fd21-012345abcdef > /run/sys/hypervisor/uuid; \
    mount --rbind /run/sys /sys'
"""

_NOLOGIN = (
    "[Service]\nExecStartPre=/bin/sleep {seconds}\n"  # this service removes /run/nologin when it starts
)


class Layout(NamedTuple):
    """How an image differs. `ssh_socket`: systemd's socket starts sshd. `nologin_seconds`: how much longer
    /run/nologin exists. `pytorch`: whether /opt/pytorch is there."""

    user: str
    groups: str  # "adm, sudo"
    is_amazon_linux: bool
    ssh_socket: bool
    nologin_seconds: float
    pytorch: bool = True


def layout_of(image_name: str, *, ssh_socket: bool, nologin_seconds: float) -> Layout:
    """Return the layout of an image by its name."""
    if "Amazon Linux" in image_name:
        return Layout("ec2-user", "adm, wheel, systemd-journal", True, ssh_socket, nologin_seconds)
    is_base = "Base OSS" in image_name  # AWS's images without a framework
    return Layout("ubuntu", "adm, sudo", False, ssh_socket, nologin_seconds, not is_base)


def write(root: Path, layout: Layout, *, environment: dict[str, str], host_name: str) -> None:
    """Write the files of a new disk below `root`. Raises OSError."""
    units = root / "etc/systemd/system"
    cloud = _CLOUD_INIT.format(user=layout.user, uid=on_node.USER_ID, groups=layout.groups)
    _write(root / "etc/cloud/cloud.cfg.d/90_simulator.cfg", cloud)
    _write(root / "etc/hostname", f"{host_name}\n")
    _write(root / "etc/environment", "".join(f'{name}="{value}"\n' for name, value in environment.items()))
    _write(units / "ec2-platform.service", _PLATFORM)
    _link(units / "sysinit.target.wants/ec2-platform.service", "../ec2-platform.service")
    if layout.ssh_socket:
        (units / "multi-user.target.wants/ssh.service").unlink()
        (units / "sshd.service").unlink(missing_ok=True)
        _link(units / "sockets.target.wants/ssh.socket", "/usr/lib/systemd/system/ssh.socket")
    if layout.nologin_seconds:
        text = _NOLOGIN.format(seconds=layout.nologin_seconds)
        _write(units / "systemd-user-sessions.service.d/late.conf", text)
    if layout.is_amazon_linux:
        _make_amazon_linux(root)


def _make_amazon_linux(root: Path) -> None:
    """Remove the group sudo, add wheel, and let `python3` be Python 3.9."""
    basic = (root / "usr/lib/sysusers.d/basic.conf").read_text()
    _write(root / "etc/sysusers.d/basic.conf", re.sub(r"^g sudo .*\n", "", basic, flags=re.MULTILINE))
    for name in ("group", "gshadow"):
        path = root / "etc" / name
        path.write_text(re.sub(r"^sudo:.*\n", "", path.read_text(), flags=re.MULTILINE))
    with (root / "etc/group").open("a") as groups:
        groups.write("wheel:x:1010:\n")
    _link(root / "usr/local/bin/python3", "/usr/bin/python3.9")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text(text)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not os.path.lexists(path):
        path.symlink_to(target)
