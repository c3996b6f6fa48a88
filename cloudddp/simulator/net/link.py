"""Puts the wide-area link between the laptop and the nodes, and takes it away again.

`tc netem` would do this in the kernel, but many kernels lack it; the process of link_process.py needs
nfnetlink_queue only, and is used everywhere.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass

from cloudddp.simulator.conditions.model import Link
from cloudddp.simulator.linux import netlink
from cloudddp.simulator.net.nftables import LINK_CHAIN, LINK_TABLE, link_ruleset, nft

_MODULE = "cloudddp.simulator.net.link_process"
_TIMEOUT = 20.0  # seconds for the process to answer; a guard against hanging


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    control: socket.socket  # its stdin and stdout


class WideAreaLink:
    """The link of one lab, at first none. Safe to use from any thread in the lab's network."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._lock = threading.Lock()

    def use(self, link: Link | None) -> None:
        """Return when the link, or its absence, is in effect. Raises OSError, with no link."""
        with self._lock:
            try:
                if link is None:
                    self._end()
                elif self._running is not None and self._running.process.poll() is None:
                    _configure(self._running, link)
                else:
                    self._end()
                    self._running = _start()
                    _configure(self._running, link)
                    _divert()
            except OSError:
                self._end()
                raise
            finally:
                _forget_measurements()

    def _end(self) -> None:
        """First the rules: without the process, the packets that they queue are lost."""
        running, self._running = self._running, None
        if running is None:
            return
        nft(link_ruleset(present=False))
        running.control.close()
        try:
            running.process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


def _forget_measurements() -> None:
    """Clear what the kernel has learned about the way to each node, and would begin new connections with."""
    subprocess.run(["ip", "tcp_metrics", "flush"], capture_output=True, check=False)


def _start() -> _Running:
    control, theirs = socket.socketpair()
    control.settimeout(_TIMEOUT)
    with theirs:
        # -P: a file in the current folder that is named like a standard module must not be imported.
        command = [sys.executable, "-P", "-m", _MODULE]
        process = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=dict(os.environ)
        )
    return _Running(process, control)


def _configure(running: _Running, link: Link) -> None:
    """Return when the process has answered. Raises OSError with its reason."""
    running.control.sendall(json.dumps(asdict(link)).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        if not (more := running.control.recv(1 << 10)):
            raise OSError("its process has ended; the simulator's log (sim/server.log) has the reason")
        answer += more
    if text := answer.decode().strip():
        raise OSError(text)


def _divert() -> None:
    """Let the packets wait for the process, which reads them already."""
    nft(link_ruleset())
    try:
        netlink.queue_all(LINK_TABLE, LINK_CHAIN)
    except OSError as error:
        raise OSError(f"this kernel queues no packets (xt_NFQUEUE, nft_compat): {error.strerror}") from None
