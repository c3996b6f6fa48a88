"""One SSH session on a loopback node: a real process, its bytes, its exit status, as OpenSSH's sshd does it.

asyncssh can connect a process to a channel by itself, but it loses track of pipes under load and closes the
channel before the last bytes are through; so the bytes are carried here. Knows nothing of EC2.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

_CHUNK = 1 << 16  # what a pipe holds
_GRACE = 0.05  # seconds for an end of file to follow an exit; later than that, somebody else holds the pipe

# A terminal must be made the session's own between fork and exec; doing that in a forked copy of a process with
# threads may deadlock, so a fresh interpreter does it and then becomes the shell.
_TAKE_TERMINAL = (
    "import fcntl,os,sys,termios;fcntl.ioctl(0,termios.TIOCSCTTY,0);os.execvp(sys.argv[1],sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands run. `open` says whether the node still is up."""

    home: Path
    environment: dict[str, str]
    open: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends of a child's pipes; for a terminal there is no `err` and both others are the same terminal."""

    into: int
    out: int
    err: int | None


async def serve(process: Any, place: Place) -> None:
    """Run what the client asked for until it has ended; the client may leave before that."""
    process.channel.set_write_buffer_limits(0)
    try:
        child, pipes = await _spawn(process, place)
    except OSError as error:
        process.stderr.write(f"simulated node: {error}\n".encode())
        process.exit(126)
        return
    if not place.open():
        # The node went down after it was last searched for processes.
        _signal_group(child.pid, signal.SIGKILL)
    await _carry(process, child, pipes)
    # sshd does not kill a command whose client is gone, it only closes its pipes; asyncio would kill it
    # if nobody held on to the child.
    await child.wait()


async def _spawn(process: Any, place: Place) -> tuple[asyncio.subprocess.Process, _Pipes]:
    argv = ["bash", "-c", process.command] if process.command is not None else ["bash"]
    if process.term_type is None:
        child_in, into = os.pipe()
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        pipes, theirs = _Pipes(into, out, err), (child_in, child_out, child_err)
        environment = place.environment
    else:
        out, terminal = os.openpty()
        _resize(out, process.term_size)
        pipes, theirs = _Pipes(os.dup(out), out, None), (terminal, terminal, terminal)
        argv = argv if process.command is not None else ["bash", "-i"]
        argv = [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *argv]
        environment = {**place.environment, "TERM": process.term_type}
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            cwd=place.home,
            env=environment,
            stdin=theirs[0],
            stdout=theirs[1],
            stderr=theirs[2],
            start_new_session=True,
        )
    except BaseException:
        _close(pipes)
        raise
    finally:
        for descriptor in set(theirs):
            os.close(descriptor)
    for end in (pipes.into, pipes.out, pipes.err):
        if end is not None:
            os.set_blocking(end, False)
    return child, pipes


async def _carry(process: Any, child: asyncio.subprocess.Process, pipes: _Pipes) -> None:
    pumps = [_Pump(pipes.out, process.stdout)]
    if pipes.err is not None:
        pumps.append(_Pump(pipes.err, process.stderr))
    flows = [asyncio.ensure_future(pump.run()) for pump in pumps]
    feed = asyncio.ensure_future(_feed(process, child.pid, pipes))
    gone = asyncio.ensure_future(process.channel.wait_closed())
    ended = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await _report(process, ended.result(), pumps, flows, gone, terminal=pipes.err is None)
    finally:
        for task in (feed, *flows, gone, ended):
            task.cancel()
        await asyncio.gather(feed, *flows, gone, ended, return_exceptions=True)
        _close(pipes)
        process.close()


async def _report(
    process: Any,
    status: int,
    pumps: list[_Pump],
    flows: Sequence[asyncio.Future[None]],
    gone: asyncio.Future[None],
    *,
    terminal: bool,
) -> None:
    """Say how the command ended, after all that it wrote, then stay while others still write to its pipes."""
    await _any(gone, asyncio.ensure_future(_all_sent(pumps)))
    await asyncio.wait(flows, timeout=_GRACE)
    if gone.done():
        return
    if terminal or all(flow.done() for flow in flows):
        _exit(process, status)
        return
    _announce(process.channel, status)
    await _any(gone, asyncio.ensure_future(asyncio.wait(flows)))


async def _all_sent(pumps: list[_Pump]) -> None:
    for pump in pumps:
        await pump.sent(pump.taken + _waiting(pump.fd))


async def _any(keep: asyncio.Future[None], other: asyncio.Future[Any]) -> None:
    await asyncio.wait({keep, other}, return_when=asyncio.FIRST_COMPLETED)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


class _Pump:
    """Carries one pipe of the child to the client, no faster than the client reads."""

    def __init__(self, fd: int, writer: Any) -> None:
        self.fd = fd
        self.taken = 0  # bytes read from the pipe
        self._passed = 0  # bytes handed to the connection
        self._over = False
        self._writer = writer
        self._moved = asyncio.Event()

    async def run(self) -> None:
        try:
            while data := await _read(self.fd):
                self.taken += len(data)
                self._writer.write(data)
                await self._writer.drain()
                self._passed = self.taken
                self._moved.set()
        except (OSError, asyncssh.Error):
            pass  # the client does not listen any more; closing the pipe tells the child, as sshd does
        finally:
            self._over = True
            self._moved.set()

    async def sent(self, target: int) -> None:
        """Return once `target` bytes are on their way, or none will be any more."""
        while self._passed < target and not self._over:
            self._moved.clear()
            await self._moved.wait()


async def _feed(process: Any, pid: int, pipes: _Pipes) -> None:
    """Carry the client's input to the child until either has had enough."""
    deaf = False
    while True:
        try:
            data = await process.stdin.read(_CHUNK)
        except asyncssh.TerminalSizeChanged as change:
            _resize(pipes.into, change.term_size)
            continue
        except asyncssh.SignalReceived as received:
            _signal_group(pid, getattr(signal, f"SIG{received.signal}", signal.SIGTERM))
            continue
        except asyncssh.BreakReceived:
            continue
        except (OSError, asyncssh.Error):
            return
        if not data:
            break
        if deaf:
            continue  # or a client that sends all before it reads would never get to read
        try:
            await _write(pipes.into, data)
        except OSError:
            deaf = True
    if pipes.err is not None and not deaf:
        # An end of file, by closing our end; the number is kept taken until the session closes.
        os.dup2(_NULL, pipes.into)


_NULL = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


async def _read(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            await _ready(fd, loop.add_reader, loop.remove_reader)
        except OSError:
            return b""  # a terminal whose last user is gone


async def _write(fd: int, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await _ready(fd, loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)


def _waiting(fd: int) -> int:
    """How many bytes are in the pipe now."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def _resize(fd: int, size: tuple[int, int, int, int]) -> None:
    columns, rows, width, height = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))


def _close(pipes: _Pipes) -> None:
    for end in (pipes.into, pipes.out, pipes.err):
        if end is not None:
            os.close(end)


def _exit(process: Any, status: int) -> None:
    if status >= 0:
        process.exit(status)
    else:
        process.exit_with_signal(_signal_name(status))


def _announce(channel: Any, status: int) -> None:
    """Send the exit status and keep the channel open, which asyncssh has no public way to do."""
    if status >= 0:
        channel._send_request(b"exit-status", struct.pack(">I", status))
        return
    name = _signal_name(status).encode()
    channel._send_request(b"exit-signal", struct.pack(">I", len(name)), name, b"\0", b"\0" * 8)


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(-status).name.removeprefix("SIG")
    except ValueError:
        return f"{-status}@cloudddp"  # a real-time signal: RFC 4254 wants private names to look like this


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
