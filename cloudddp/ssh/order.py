"""No data is sent on a channel after its EOF and nothing after its CLOSE: a server ends the whole connection for it.

paramiko decides to send (data, EOF, a wider window) under the channel's lock and sends after releasing it, so its own
thread can answer the server's CLOSE, which takes an EOF and a CLOSE, in between. Here every packet of a channel carries
that channel, and is dropped where it comes too late: RFC 4254, section 5.3. The channel number is not enough, since
sshd reuses it for the next channel at once.

paramiko's own thread answers CLOSE, too. During a key re-exchange (every 512 MiB) it would wait for the end of the
exchange, which it has to carry out itself, and close the connection after 30 s. What it sends during that time is
handed to another thread.

It must not know commands or nodes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko

# SSH_MSG_CHANNEL_...
DATA, EXTENDED_DATA, EOF, CLOSE = 94, 95, 96, 97
NOT_AFTER_EOF = (DATA, EXTENDED_DATA, EOF)


def keep_order(transport: paramiko.Transport) -> None:
    """Keep the order on every channel that this side opens from now on."""
    send = transport.packetizer.send_message
    open_channel = transport.open_channel

    def send_in_order(message: paramiko.Message) -> None:
        # One packet at a time comes here, in its final order: paramiko holds `clear_to_send_lock`.
        sender: _Sender | None = getattr(message, "sender", None)
        if sender is None or sender.may_send(message):
            send(message)

    def open_guarded(*args: Any, **kwargs: Any) -> paramiko.Channel:
        channel = open_channel(*args, **kwargs)
        channel.transport = _Sender(transport, later)
        return channel

    later = _Later(transport)
    transport.packetizer.send_message = send_in_order
    transport.open_channel = open_guarded


class _Sender:
    """The transport as one channel sees it: what it sends is marked as its own."""

    def __init__(self, transport: paramiko.Transport, later: _Later) -> None:
        self._transport = transport
        self._later = later
        self._sent: set[int] = set()  # of EOF and CLOSE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: paramiko.Message) -> None:
        message.sender = self
        # Only this thread begins a key exchange, so none can begin between this check and the sending.
        if threading.get_ident() == self._transport.ident and not self._transport.clear_to_send.is_set():
            self._later.send(message)
        else:
            self._transport._send_user_message(message)

    def may_send(self, message: paramiko.Message) -> bool:
        """Whether it is not too late for this packet; remembers EOF and CLOSE."""
        kind = message.asbytes()[0]
        if CLOSE in self._sent or (EOF in self._sent and kind in NOT_AFTER_EOF):
            return False
        if kind in (EOF, CLOSE):
            self._sent.add(kind)
        return True


class _Later:
    """Sends, in order, what has to wait for the end of a key exchange."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._waiting: deque[paramiko.Message] = deque()
        self._lock = threading.Lock()

    def send(self, message: paramiko.Message) -> None:
        self._waiting.append(message)
        threading.Thread(target=self._send_next, daemon=True).start()

    def _send_next(self) -> None:
        import paramiko

        # If the connection ends meanwhile, whoever waits for an answer gets the error.
        with self._lock, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._transport._send_user_message(self._waiting.popleft())
