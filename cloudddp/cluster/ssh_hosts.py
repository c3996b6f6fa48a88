"""The nodes as hosts of OpenSSH, NAME-0 and so on, in the cluster's folder: see ssh/openssh.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError, ProgressCallback, StepWarning
from cloudddp.local_state import ClusterFolder, drop_ssh_configs
from cloudddp.ssh import openssh
from cloudddp.ssh.target import Target
from cloudddp.text import reason_of


def write(cluster: Cluster, targets: Mapping[int, Target]) -> Path:
    """Write the nodes instead of earlier ones, and return the file. Raises OSError, CloudDDPError."""
    folder = ClusterFolder(cluster.id)
    hosts = {f"{cluster.name}-{rank}": target for rank, target in targets.items() if target.host_keys}
    known = "".join(f"{host.known_as} {key}\n" for host in hosts.values() for key in host.host_keys)
    config = openssh.config(hosts, folder.known_hosts)
    if (folder.read(folder.known_hosts), folder.read(folder.ssh_config)) != (known, config):
        folder.write(folder.known_hosts, known)
        folder.write(folder.ssh_config, config)
        drop_ssh_configs(cluster.name, but=cluster.id)
    return folder.ssh_config


def update(cluster: Cluster, targets: Mapping[int, Target], progress: ProgressCallback) -> None:
    """As `write`: nodes may have new addresses and host keys. Not for a part of a cluster, which would remove
    the others."""
    if cluster.missing:
        return
    try:
        write(cluster, targets)
    except (OSError, CloudDDPError) as error:
        progress(StepWarning(f"cannot update the OpenSSH configuration: {reason_of(error)}"))
