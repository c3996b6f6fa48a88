"""Two defects of paramiko, fixed on each connection: both end a connection that other commands share.

1. Data or EOF after CLOSE (https://github.com/paramiko/paramiko/issues/1584 and /1705, open; the fix offered
   in https://github.com/paramiko/paramiko/pull/1131 was not merged). paramiko decides to send (data, EOF, a
   window adjustment) under the channel's lock and sends after releasing it, so its transport thread can
   answer the server's CLOSE, by EOF and CLOSE, in between. RFC 4254, section 5.3 forbids what follows, and
   OpenSSH ends the connection ("Received ieof for nonexistent channel"). Here every packet of a channel
   carries that channel, and is dropped if it comes too late. The channel number is not enough: sshd reuses it
   for the next channel at once.
2. A CLOSE during a key re-exchange (https://github.com/paramiko/paramiko/issues/822, open). paramiko
   re-exchanges keys every 512 MiB. Its transport thread, which carries the exchange out, also answers CLOSE;
   then it waits for the end of the exchange, and the connection fails after 30 s. With an exchange every 256
   packets, 3 of 149 commands at OpenSSH 9.2 lost the connection without this fix, and 0 of 160 with it. Here
   what that thread sends during an exchange is handed to another thread.

Independent of commands and nodes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko

from cloudddp import timings

# SSH_MSG_CHANNEL_...
_DATA, _EXTENDED_DATA, _EOF, _CLOSE = 94, 95, 96, 97
_NOT_AFTER_EOF = (_DATA, _EXTENDED_DATA, _EOF)


_loading = threading.Lock()


def load() -> None:
    """Import paramiko, without invoke, which paramiko needs only for `Match exec` in SSHConfig, which is not
    used here.

    invoke and its copy of PyYAML are almost half of the import.
    """
    with _loading:
        if "paramiko" in sys.modules:
            return
        is_loaded = "invoke" in sys.modules
        if not is_loaded:
            sys.modules["invoke"] = None  # type: ignore[assignment]  # an import of it raises ImportError
        try:
            with timings.span("imports: paramiko"):
                import paramiko  # noqa: F401
        finally:
            if not is_loaded:
                del sys.modules["invoke"]


@contextlib.contextmanager
def loaded_meanwhile() -> Iterator[None]:
    """Import paramiko while the body waits for something else; return when both have ended."""
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def apply(transport: paramiko.Transport) -> None:
    """Fix every channel that this side opens on the connection from now on."""
    send = transport.packetizer.send_message
    open_channel = transport.open_channel

    def send_unless_late(message: paramiko.Message) -> None:
        # One packet at a time arrives here, in its final order: paramiko holds `clear_to_send_lock`.
        sender: _Sender | None = getattr(message, "sender", None)
        if sender is None or sender.may_send(message):
            send(message)

    def open_fixed(*args: Any, **kwargs: Any) -> paramiko.Channel:
        channel = open_channel(*args, **kwargs)
        channel.transport = _Sender(transport, deferred)
        return channel

    deferred = _DeferredSender(transport)
    transport.packetizer.send_message = send_unless_late
    transport.open_channel = open_fixed


def silence_log() -> None:
    """Prevent paramiko's threads from printing tracebacks: the error that we raise contains what they log."""
    log = logging.getLogger("paramiko")
    if not log.handlers:
        log.addHandler(logging.NullHandler())


class _Sender:
    """The transport of one channel: marks the packets that the channel sends."""

    def __init__(self, transport: paramiko.Transport, deferred: _DeferredSender) -> None:
        self._transport = transport
        self._deferred = deferred
        self._sent: set[int] = set()  # which of EOF and CLOSE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: paramiko.Message) -> None:
        import paramiko

        try:
            self._send(message)
        except (OSError, EOFError, paramiko.SSHException):
            # Closing a channel on a broken connection must not raise: the error would take the place of the
            # one that the user needs.
            if message.asbytes()[0] not in (_EOF, _CLOSE):
                raise

    def _send(self, message: paramiko.Message) -> None:
        message.sender = self
        # Only this thread starts a key exchange, so none can start between this check and the sending.
        is_own_thread = threading.get_ident() == self._transport.ident
        if is_own_thread and not self._transport.clear_to_send.is_set():
            self._deferred.send(message)
        else:
            self._transport._send_user_message(message)

    def may_send(self, message: paramiko.Message) -> bool:
        """Return whether a packet is still allowed on the channel; remembers EOF and CLOSE."""
        kind = message.asbytes()[0]
        if _CLOSE in self._sent or (_EOF in self._sent and kind in _NOT_AFTER_EOF):
            return False
        if kind in (_EOF, _CLOSE):
            self._sent.add(kind)
        return True


class _DeferredSender:
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

        # If the connection ends meanwhile, the thread that waits for an answer gets the error.
        with self._lock, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._transport._send_user_message(self._waiting.popleft())
