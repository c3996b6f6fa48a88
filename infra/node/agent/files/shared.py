"""[[shared]]: folders that all nodes share, in ~/cloudddp-shared, with links in the project.

The first node exports one folder, which has those of all [[shared]] with source = "node0"; or an EFS or
Lustre file system is mounted. Only one node, the owner, counts the files as results, and none copies them.
`findmnt` reads the kernel's table: a look at a mount whose server has gone would wait for it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from agent.files import paths
from agent.node import store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.start import SharedFolder

FOLDER = Path.home() / "cloudddp-shared"
EXPORTED = FOLDER / "node0"
RECORD = store.ROOT / "shared.json"
# Of mounts, by type: what AWS recommends. noresvport means a port above 1023, so that exports are `insecure`.
OPTIONS = {
    "nfs4": "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport",
    "lustre": "relatime,flock",
}
# mount waits for minutes. timeout(1) kills itself, too, and sudo repeats that: a shell would report 137.
LIMIT, TOO_LATE = ("timeout", "--signal=KILL", "60"), (-signal.SIGKILL, 128 + signal.SIGKILL)
# sync: what a rank has saved is on the disk, also if the node reboots. fsid=0: clients mount ADDRESS:/.
EXPORT_OPTIONS = "rw,sync,no_subtree_check,insecure,fsid=0"
EXPORT = b"""set -e
mkdir -p /etc/exports.d
printf '%s\\n' "$2" > /etc/exports.d/cloudddp.exports
systemctl start nfs-server
exportfs -ra
"""
# Program -> its package on Ubuntu. Amazon Linux has both in nfs-utils.
PACKAGES = {"exportfs": "nfs-kernel-server", "mount.nfs4": "nfs-common"}
INSTALL = (
    "if command -v apt-get > /dev/null; then sudo -n apt-get -qq update; "
    "sudo -n apt-get -qq install --no-install-recommends {}; else sudo -n dnf -qy install nfs-utils; fi"
)


@frozen
class Places:
    """The paths of shared folders in the project, and those of them that count on another node."""

    paths: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def places() -> Places:
    return store.read(RECORD, Places) or Places()


def is_below(name: str, folders: Collection[str]) -> bool:
    return any(f"{name}/".startswith(f"{folder}/") for folder in folders)


def missing(folders: Sequence[SharedFolder]) -> set[str]:
    """Return the programs that this node lacks."""
    needed = {
        f"mount.{_kind(folder.source)}" if folder.source else "exportfs"
        for folder in folders
        if folder.source or folder.clients
    }
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return {name for name in needed if shutil.which(name, path=path) is None}


def commands(folders: Sequence[SharedFolder]) -> Iterator[tuple[list[str], bytes]]:
    """Yield what has to run, with its stdin, so that the file systems are mounted, and no others; what NFS
    needs is installed first. Raises OSError, also where the node lacks the Lustre client."""
    lacking = missing(folders)
    if lacking - PACKAGES.keys():
        raise FileNotFoundError(
            "the Lustre client (mount.lustre) is missing: install it in [setup] run, or give an image with it"
        )
    if lacking:
        yield ["bash", "-c", INSTALL.format(" ".join(sorted(PACKAGES[name] for name in lacking)))], b""
    wanted = {str(_mount_point(folder)): folder.source for folder in folders if folder.source}
    listed = run_quietly(["findmnt", "-rno", "TARGET", "-t", ",".join(OPTIONS)]).splitlines()
    mounted = {one for one in listed if one.startswith(f"{FOLDER}/")}
    for target in sorted(mounted - wanted.keys()):  # of a node that was replaced, or was the first one
        yield ["sudo", "-n", "umount", "--lazy", target], b""
    for one in folders:
        if not one.source:
            (EXPORTED / one.below).mkdir(parents=True, exist_ok=True)
    if clients := next((folder.clients for folder in folders if folder.clients), ()):
        line = " ".join([f'"{EXPORTED}"', *(f"{address}({EXPORT_OPTIONS})" for address in clients)])
        yield ["sudo", "-n", "sh", "-s", "--", "share-folder", line], EXPORT
    for target in sorted(wanted.keys() - mounted):
        source = wanted[target]
        kind = _kind(source)
        os.makedirs(target, exist_ok=True)
        yield ["sudo", "-n", *LIMIT, "mount", "-t", kind, "-o", OPTIONS[kind], source, target], b""


def _kind(source: str) -> str:
    return "lustre" if "@" in source else "nfs4"


def _mount_point(one: SharedFolder) -> Path:
    return FOLDER / re.sub(r"[^A-Za-z0-9.-]", "_", one.source)


def link(folders: Sequence[SharedFolder], project: Path) -> None:
    """Link the project's paths to the folders. Raises OSError, also where the project has something else
    there."""
    for folder in folders:
        base = _mount_point(folder) if folder.source else EXPORTED
        paths.link_to(project, folder.path, base / folder.below, "[[shared]]")
    elsewhere = tuple(folder.path for folder in folders if not folder.owned)
    store.write(RECORD, Places(tuple(folder.path for folder in folders), elsewhere))
