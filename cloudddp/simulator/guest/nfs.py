"""The commands of NFS: exportfs, mount, umount, findmnt.

Root of a node may mount nothing: a link into a folder that all nodes have stands in for the network file
system. The folder that a node exports is moved there, and a link takes its place.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from . import on_node

EXPORTS = "/etc/exports.d/cloudddp.exports"
MOUNTS = "/home/ubuntu/cloudddp-shared"


def _own() -> str:
    """Return where this node's exported folder is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return f"{on_node.SHARED_FOLDER}/{probe.getsockname()[0]}"


def exportfs(_arguments: list[str]) -> int:
    with open(EXPORTS) as file:
        exported = file.read().split('"')[1]
    if not os.path.islink(exported):  # otherwise it was exported before
        subprocess.run(["rm", "-rf", _own()], check=True)  # of a node that had this address
        subprocess.run(["mv", exported, _own()], check=True)
        os.symlink(_own(), exported)
    return 0


def mount(arguments: list[str]) -> int:
    if arguments[:2] != ["-t", "nfs4"]:
        os.execv("/usr/bin/mount", ["mount", *arguments])  # noqa: S606
    source, target = arguments[-2:]
    exported = f"{on_node.SHARED_FOLDER}/{source.partition(':')[0]}"
    if not os.path.isdir(exported):
        print(f"mount.nfs4: access denied by server while mounting {source}", file=sys.stderr)
        return 32
    os.rmdir(target)
    os.symlink(exported, target)
    print("simulated node: a link stands in for the network file system")
    return 0


def umount(arguments: list[str]) -> int:
    if not os.path.islink(arguments[-1]):
        os.execv("/usr/bin/umount", ["umount", *arguments])  # noqa: S606
    os.unlink(arguments[-1])
    return 0


def findmnt(arguments: list[str]) -> int:
    if "nfs4,lustre" not in arguments:
        os.execv("/usr/bin/findmnt", ["findmnt", *arguments])  # noqa: S606
    for entry in os.scandir(MOUNTS) if os.path.isdir(MOUNTS) else ():
        if entry.is_symlink() and os.readlink(entry.path) != _own():
            print(entry.path)
    return 0
