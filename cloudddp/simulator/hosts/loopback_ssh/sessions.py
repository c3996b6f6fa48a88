"""One SSH session on a loopback node: runs a process and transfers its data and exit status, as OpenSSH's
sshd does.

asyncssh can redirect a process to a channel by itself, but under load it closes the channel before the last
bytes have been sent.
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

_CHUNK = 1 << 16  # the capacity of a pipe
_EOF_SECONDS = 0.05  # for EOF to follow the exit; later, another process holds the pipe

# The controlling terminal has to be set between fork and exec. In a fork of a process with threads, that may
# deadlock, so a new interpreter sets it and then becomes the shell.
_SET_TERMINAL = (
    "import fcntl,os,sys,termios;fcntl.ioctl(0,termios.TIOCSCTTY,0);os.execvp(sys.argv[1],sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where commands run. `open` returns whether the node is still up."""

    home: Path
    environment: dict[str, str]
    open: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends of a child's pipes. With a terminal, `stdin` and `stdout` are the terminal, and `stderr` is
    None."""

    stdin: int
    stdout: int
    stderr: int | None


async def serve(process: Any, workspace: Workspace) -> None:
    """Run the client's command until it has ended; the client may disconnect earlier."""
    process.channel.set_write_buffer_limits(0)
    try:
        child, pipes = await _spawn(process, workspace)
    except OSError as error:
        process.stderr.write(f"simulated node: {error}\n".encode())
        process.exit(126)
        return
    if not workspace.open():
        # The node was halted after its processes were killed.
        _signal_group(child.pid, signal.SIGKILL)
    await _transfer(process, child, pipes)
    # sshd closes the pipes of a command whose client has disconnected, and does not kill it. asyncio would
    # kill it if the child were garbage collected.
    await child.wait()


async def _spawn(process: Any, workspace: Workspace) -> tuple[asyncio.subprocess.Process, _Pipes]:
    argv = ["bash", "-c", process.command] if process.command is not None else ["bash"]
    if process.term_type is None:
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        stderr, child_stderr = os.pipe()
        pipes, child_ends = _Pipes(stdin, stdout, stderr), (child_stdin, child_stdout, child_stderr)
        environment = workspace.environment
    else:
        stdout, terminal = os.openpty()
        _resize(stdout, process.term_size)
        pipes, child_ends = _Pipes(os.dup(stdout), stdout, None), (terminal, terminal, terminal)
        argv = argv if process.command is not None else ["bash", "-i"]
        argv = [sys.executable, "-I", "-S", "-c", _SET_TERMINAL, *argv]
        environment = {**workspace.environment, "TERM": process.term_type}
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            cwd=workspace.home,
            env=environment,
            stdin=child_ends[0],
            stdout=child_ends[1],
            stderr=child_ends[2],
            start_new_session=True,
        )
    except BaseException:
        _close(pipes)
        raise
    finally:
        for descriptor in set(child_ends):
            os.close(descriptor)
    for end in (pipes.stdin, pipes.stdout, pipes.stderr):
        if end is not None:
            os.set_blocking(end, False)
    return child, pipes


async def _transfer(process: Any, child: asyncio.subprocess.Process, pipes: _Pipes) -> None:
    pumps = [_Pump(pipes.stdout, process.stdout)]
    if pipes.stderr is not None:
        pumps.append(_Pump(pipes.stderr, process.stderr))
    outputs = [asyncio.ensure_future(pump.run()) for pump in pumps]
    feed = asyncio.ensure_future(_feed(process, child.pid, pipes))
    disconnected = asyncio.ensure_future(process.channel.wait_closed())
    ended = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({ended, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            has_terminal = pipes.stderr is None
            await _finish(process, ended.result(), pumps, outputs, disconnected, terminal=has_terminal)
    finally:
        for task in (feed, *outputs, disconnected, ended):
            task.cancel()
        await asyncio.gather(feed, *outputs, disconnected, ended, return_exceptions=True)
        _close(pipes)
        process.close()


async def _finish(
    process: Any,
    status: int,
    pumps: list[_Pump],
    outputs: Sequence[asyncio.Future[None]],
    disconnected: asyncio.Future[None],
    *,
    terminal: bool,
) -> None:
    """Send the exit status after all output of the command, and stay while other processes hold its pipes."""
    await _first_of(disconnected, asyncio.ensure_future(_all_sent(pumps)))
    await asyncio.wait(outputs, timeout=_EOF_SECONDS)
    if disconnected.done():
        return
    if terminal or all(output.done() for output in outputs):
        _exit(process, status)
        return
    _send_exit_status(process.channel, status)
    await _first_of(disconnected, asyncio.ensure_future(asyncio.wait(outputs)))


async def _all_sent(pumps: list[_Pump]) -> None:
    for pump in pumps:
        await pump.wait_until_sent(pump.read + _bytes_in_pipe(pump.fd))


async def _first_of(keep: asyncio.Future[None], other: asyncio.Future[Any]) -> None:
    """Wait for either, and cancel `other`."""
    await asyncio.wait({keep, other}, return_when=asyncio.FIRST_COMPLETED)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


class _Pump:
    """Copies one pipe of the child to the client, no faster than the client reads."""

    def __init__(self, fd: int, writer: Any) -> None:
        self.fd = fd
        self.read = 0  # bytes read from the pipe
        self._sent = 0  # bytes passed to the connection
        self._done = False
        self._writer = writer
        self._progress = asyncio.Event()

    async def run(self) -> None:
        try:
            while data := await _read(self.fd):
                self.read += len(data)
                self._writer.write(data)
                await self._writer.drain()
                self._sent = self.read
                self._progress.set()
        except (OSError, asyncssh.Error):
            pass  # the client has disconnected; the child gets an error when the pipe is closed, as with sshd
        finally:
            self._done = True
            self._progress.set()

    async def wait_until_sent(self, count: int) -> None:
        """Return once `count` bytes have been sent, or no more will be."""
        while self._sent < count and not self._done:
            self._progress.clear()
            await self._progress.wait()


async def _feed(process: Any, pid: int, pipes: _Pipes) -> None:
    """Copy the client's input to the child until it ends."""
    discard = False
    while True:
        try:
            data = await process.stdin.read(_CHUNK)
        except asyncssh.TerminalSizeChanged as change:
            _resize(pipes.stdin, change.term_size)
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
        if discard:
            continue  # a client that sends everything before it reads must not block
        try:
            await _write(pipes.stdin, data)
        except OSError:
            discard = True
    if pipes.stderr is not None and not discard:
        # EOF, by closing our end. The descriptor number stays in use until the session is closed.
        os.dup2(_NULL, pipes.stdin)


_NULL = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


async def _read(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            await _ready(fd, loop.add_reader, loop.remove_reader)
        except OSError:
            return b""  # a terminal without any process


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


def _bytes_in_pipe(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def _resize(fd: int, size: tuple[int, int, int, int]) -> None:
    columns, rows, width, height = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))


def _close(pipes: _Pipes) -> None:
    for end in (pipes.stdin, pipes.stdout, pipes.stderr):
        if end is not None:
            os.close(end)


def _exit(process: Any, status: int) -> None:
    if status >= 0:
        process.exit(status)
    else:
        process.exit_with_signal(_signal_name(status))


def _send_exit_status(channel: Any, status: int) -> None:
    """Send the exit status and keep the channel open, for which asyncssh has no public function."""
    if status >= 0:
        channel._send_request(b"exit-status", struct.pack(">I", status))
        return
    name = _signal_name(status).encode()
    channel._send_request(b"exit-signal", struct.pack(">I", len(name)), name, b"\0", b"\0" * 8)


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(-status).name.removeprefix("SIG")
    except ValueError:
        return f"{-status}@cloudddp"  # a real-time signal; RFC 4254 has this form for private names


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
