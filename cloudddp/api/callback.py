"""What the functions of the API report to: a callback of the caller, or nobody."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable

from cloudddp.operations.reporter import StepLines

OnProgress = Callable[[str], None]


class Callback(contextlib.AbstractContextManager["Callback"]):
    """A Reporter, and the Steps of its operations, for a callback."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._call = on_progress
        self._lock = threading.RLock()  # a signal handler may report, too
        self._lines = StepLines()

    def log(self, text: str) -> None:
        """Pass on a message. An error of the callback is a warning: it must not stop a teardown."""
        if self._call is None:
            return
        try:
            with self._lock:
                self._call(str(text))
        except Exception as error:
            warnings.warn(f"on_progress failed: {error!r}", RuntimeWarning, stacklevel=2)

    suggest = log

    def warn(self, text: str) -> None:
        self.log(f"warning: {text}")

    def progress(self) -> Callback:
        return self

    def ask_secret(self, question: str) -> None:
        """Nobody can be asked."""

    def agree(self, question: str) -> None:
        """Nobody can be asked."""

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, text: str) -> None:
        if self._lines.has_next(text):
            self.log(text)

    def stop(self) -> None:
        self._lines = StepLines()


def warn_in_event_loop() -> None:
    """Warn in a coroutine, which a call would block. A notebook's cells run in a loop of their own."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or "ipykernel" in sys.modules:
        return
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        text = "cloudddp blocks the running event loop; use `await asyncio.to_thread(...)`"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
