"""A few threads for work that waits: starting a command, connecting again. They end when nothing is left to do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cloudddp.ssh.event_loop import event_loop


class TaskPool:
    """Does tasks in at most `width` daemon threads, in order. A task must not raise."""

    def __init__(self, width: int, name: str) -> None:
        self._width, self._name = width, name
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0

    def submit(self, task: Callable[[], None]) -> None:
        self._todo.put(task)
        with self._lock:
            is_needed = self._threads < self._width
            self._threads += is_needed
        if is_needed:
            threading.Thread(target=self._work, daemon=True, name=self._name).start()

    def submit_later(self, seconds: float, task: Callable[[], None]) -> None:
        """Do it once that time has passed and a thread is free."""
        event_loop().call_later(seconds, lambda: self.submit(task))

    def _work(self) -> None:
        while True:
            try:
                task = self._todo.get_nowait()
            except queue.Empty:
                with self._lock:
                    if self._todo.empty():
                        self._threads -= 1
                        return
                continue
            task()
