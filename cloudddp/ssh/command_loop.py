"""Commands of many nodes, advanced by one thread. Starting one waits for its node, and is done by a few other threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from cloudddp.ssh.channel import LONGEST_WAIT, CommandIO
from cloudddp.ssh.running import CommandSpec, Result, RunningCommand
from cloudddp.ssh.tasks import TaskPool

STARTS = 16  # commands that are being started at a time

OnEnd = Callable[[Result | Exception], None]
Start = Callable[[CommandSpec, Callable[[], None]], RunningCommand]


class CommandLoop:
    """The commands of one fleet. What a command's input and output call, and `on_end`, runs in the loop's thread: while it
    blocks, the other commands wait, and their nodes with them."""

    def __init__(self) -> None:
        self._starts = TaskPool(STARTS, "ssh command start")
        self._lock = threading.Lock()
        self._is_running = False
        self._left = 0  # commands that have not ended
        self._wake = threading.Event()
        self._ready: deque[_Entry] = deque()  # may have something to do

    def start(self, start: Start, spec: CommandSpec, on_end: OnEnd) -> None:
        """Start a command, by calling `start` in another thread. `on_end` is called once, with its result or error."""
        entry = _Entry(on_end, self._wake, self._ready)
        with self._lock:
            self._left += 1
        self._starts.submit(lambda: self._begin(entry, start, spec))

    def _begin(self, entry: _Entry, start: Start, spec: CommandSpec) -> None:
        try:
            entry.command = start(spec, entry.wake)
        except Exception as error:
            entry.error = error
        entry.is_started = True
        entry.wake()
        with self._lock:
            is_needed, self._is_running = not self._is_running, True
        if is_needed:
            threading.Thread(target=self._run, daemon=True, name="ssh commands").start()

    def _run(self) -> None:
        running: dict[int, _Entry] = {}
        look = time.monotonic()  # when all are looked at again: time limits may have passed
        while True:
            self._wake.clear()
            now = time.monotonic()
            todo = list(running.values()) if now >= look else []
            for _ in range(len(self._ready)):
                entry = self._ready.popleft()
                entry.is_queued = False
                todo.append(entry)
            for entry in dict.fromkeys(todo):
                if not entry.is_started or entry.has_ended:
                    continue
                running[id(entry)] = entry
                if entry.advance():
                    del running[id(entry)]
                    if self._count_end():
                        return
            if now >= look or todo:
                look = min(look if now < look else now + LONGEST_WAIT, now + self._patience(running))
            if not self._ready:
                self._wake.wait(max(0.0, look - time.monotonic()))

    def _patience(self, running: dict[int, _Entry]) -> float:
        return min((entry.patience for entry in running.values()), default=LONGEST_WAIT)

    def _count_end(self) -> bool:
        """Note that a command has ended, and return whether the thread ends, since no other one is left."""
        with self._lock:
            self._left -= 1
            if self._left:
                return False
            self._is_running = False
            return True


class _Entry:
    """A command of the loop: until it is started there is only what to call at its end."""

    def __init__(self, on_end: OnEnd, wake: threading.Event, ready: deque[_Entry]) -> None:
        self._on_end, self._wake, self._ready = on_end, wake, ready
        self.command: RunningCommand | None = None
        self.error: Exception | None = None
        self.is_started = self.has_ended = self.is_queued = False

    def wake(self) -> None:
        if not self.is_queued:  # a flood of packets calls this for each of them
            self.is_queued = True
            self._ready.append(self)
        self._wake.set()

    @property
    def patience(self) -> float:
        return LONGEST_WAIT if self.command is None else self.command.patience

    def advance(self) -> bool:
        """Move the command on, and return whether it has ended."""
        end: Result | Exception
        try:
            if self.command is None:
                raise self.error or AssertionError("a command that was not started")
            state = self.command.advance()
            if state != CommandIO.ENDED:
                if state == CommandIO.MOVED:
                    self.wake()
                return False
            end = self.command.result()
        except Exception as error:
            end = error
        self.has_ended = True
        if self.command is not None:
            self.command.close()
        self._on_end(end)
        return True
