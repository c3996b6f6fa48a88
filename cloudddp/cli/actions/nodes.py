"""`ssh` and `ssh-config`: OpenSSH with the cluster's keys."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cluster import connect, ssh_hosts
from cloudddp.errors import CloudDDPError, UsageError, q
from cloudddp.local_state import openssh_names
from cloudddp.ssh import openssh

_WITH_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"  # options of OpenSSH's `ssh`


def ssh(console: Console, *, words: Sequence[str]) -> None:
    given, node, command = _ssh_words(words)
    session = start_session(console)
    cluster, spec = session.account.cluster(), session.settings.cluster
    cluster.require_node(node)
    program = shutil.which("ssh")
    if program is None:
        hint = "install openssh-client, or use `cloudddp exec`, which does not need it"
        raise CloudDDPError("OpenSSH's `ssh` is not installed", hint=hint)
    connect.complete_host_keys(cluster, spec, progress=console.log)
    targets, lost = connect.targets(cluster, spec)
    if node in lost:
        raise lost[node]
    targets[node].require_host_key()
    # -F: the user's own settings, such as `ForwardAgent yes` for every host, do not count.
    config = ssh_hosts.write(cluster, targets)
    console.print_timings()  # until here: OpenSSH takes the place of this process
    words = [program, "-F", str(config), *given, f"{cluster.name}-{node}", *command]
    os.execv(program, words)  # noqa: S606  no shell


def _ssh_words(words: Sequence[str]) -> tuple[Sequence[str], int, Sequence[str]]:
    """Return the options for OpenSSH before the node, the node (or 0), and the rest. Raises UsageError."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        letters = words[at][1:]
        first = next((index for index, letter in enumerate(letters) if letter in _WITH_VALUE), None)
        at += 2 if first == len(letters) - 1 else 1  # the next word is its value, unless that is attached
    node = words[at] if at < len(words) else "0"
    if not (node.isascii() and node.isdigit()):
        raise UsageError(f"not a node number: {node!r}", hint=f"for example: `cloudddp ssh 0 -- {q(node)}`")
    return words[:at], int(node), words[at + 1 :]


def ssh_config(console: Console) -> None:
    console.print(openssh.include_line())
    console.log("needed once, at the top of ~/.ssh/config: then NAME-0 is node 0 of the cluster NAME")
    if hosts := openssh_names():
        console.log(f"names now: {' '.join(hosts)}")
    else:
        console.suggest("no node has a name yet: `cloudddp up` on this computer adds those of its cluster")
