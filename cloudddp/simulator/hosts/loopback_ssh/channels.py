"""The channels of an SSH connection, as tolerant of late packets as OpenSSH's sshd.

A client's thread may send data on a channel whose EOF another thread has just sent, or adjust the window of a
closed one (paramiko's do). sshd ignores that (channel_input_data and channel_input_window_adjust in
channels.c); asyncssh closes the connection with everything that runs on it. Any other packet for a closed
channel closes the connection with either server. A command is bytes, as for sshd; asyncssh refuses one that
is not UTF-8.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import asyncssh

_WINDOW_ADJUST, _DATA, _EXTENDED_DATA, _EOF = 93, 94, 95, 96
_OPEN = "open"
_AT_EOF = ("eof_pending", "eof")


class Channels(dict[int, Any]):
    """Replaces the dictionary in which asyncssh looks up the receiver of a packet."""

    def __setitem__(self, number: int, channel: Any) -> None:
        if hasattr(channel, "_process_exec_request"):  # of a server, not of a forwarding
            channel._process_exec_request = functools.partial(_execute, channel)
        super().__setitem__(number, channel)

    def __getitem__(self, number: int) -> Any:
        channel = self.get(number)
        state = None if channel is None else channel._recv_state
        if state == _OPEN:
            return channel
        ignored = (_DATA, _EXTENDED_DATA, _EOF) if state in _AT_EOF else (_WINDOW_ADJUST,)
        return _EndedChannel(number, channel, ignored)


def _execute(channel: Any, packet: Any) -> bool:
    """Process a request to run a command."""
    command = packet.get_string()
    packet.check_end()
    return bool(channel._start_session(command=os.fsdecode(command)))


class _EndedChannel:
    """Receives packets for a channel after its EOF or close; `channel` is None once asyncssh has removed
    it."""

    def __init__(self, number: int, channel: Any, ignored: tuple[int, ...]) -> None:
        self._number = number
        self._channel = channel
        self._ignored = ignored

    def log_received_packet(self, *arguments: Any) -> None:
        if self._channel is not None:
            self._channel.log_received_packet(*arguments)

    def process_packet(self, kind: int, packet_id: int, packet: Any) -> Any:
        if kind in self._ignored:
            return True
        if self._channel is None:
            raise asyncssh.ProtocolError(f"Invalid channel number {self._number} received")
        return self._channel.process_packet(kind, packet_id, packet)
