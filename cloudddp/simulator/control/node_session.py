"""A connection to a port of a node that needs no route from this computer, as AWS Systems Manager provides
it.

On AWS an agent on the node connects to the node's own port, so neither a public address nor a rule of a
security group is needed ("You can close inbound ports on the node",
https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html).
"""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path
from typing import Any

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.control.admin_client import nodes
from cloudddp.simulator.control.environment import enter
from cloudddp.simulator.control.record import Simulator
from cloudddp.simulator.linux import kernel

_CHUNK = 1 << 16
_TIMEOUT = 10.0  # seconds to connect


def relay(sim: Simulator, target: str, port: int) -> None:
    """Connect stdin and stdout with a port of a node, until one side ends. Raises CloudDDPError, worded as by
    AWS.

    Call it while there is a single thread. This process moves to the node's network.
    """
    node = next((one for one in nodes(sim) if one["instance_id"] == target), None)
    if node is None or node["state"] != "running" or not node["home"]:
        raise CloudDDPError(
            "An error occurred (TargetNotConnected) when calling the StartSession operation: "
            f"{target} is not connected."
        )
    try:
        connection = _connect(sim, node, port)
    except OSError as error:
        raise CloudDDPError(f"Connection to destination port failed: {target} port {port}: {error}") from None
    with connection:
        _copy(connection)


def _connect(sim: Simulator, node: dict[str, Any], port: int) -> socket.socket:
    if sim.has_lab:
        enter(sim)
        pid = Path(node["home"]).parts[2]  # /proc/PID/root/...
        kernel.setns(Path(f"/proc/{pid}/ns/net"), kernel.CLONE_NEWNET)
        return socket.create_connection(("127.0.0.1", port), _TIMEOUT)
    address = (node["private_ip"], sim.ssh_port if port == 22 else port)
    return socket.create_connection(address, _TIMEOUT)


def _copy(connection: socket.socket) -> None:
    connection.settimeout(None)
    reading = [connection.fileno(), 0]
    while connection.fileno() in reading:
        for ready in select.select(reading, [], [])[0]:
            try:
                data = os.read(ready, _CHUNK)
                if ready == 0 and data:
                    connection.sendall(data)
                elif ready == 0:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:  # the other side has ended
                return
            if ready != 0:
                _write(data)
            if not data:
                reading.remove(ready)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
