"""What this node is like, collected by a thread while the nodes of a job connect to each other."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from agent.gang import preflight
from agent.node import store
from agent.node.commands import program
from agent.s3 import copies
from cloudddp.agent.protocol.gang import MAX_FACT, Facts
from cloudddp.agent.protocol.start import StartRequest


class FactCollector:
    """Collects the facts, and calls `on_found`. `found` is None until then."""

    def __init__(self, request: StartRequest, *, on_found: Callable[[], object]) -> None:
        self.found: Optional[Facts] = None
        self._request = request
        self._on_found = on_found
        first = request.processes[0] if request.processes else None
        word = (first.launcher or first.rank)[0] if first else ""
        python = program(word, store.project_folder(request.project))
        threading.Thread(target=self._collect, args=(python,), daemon=True).start()

    def _collect(self, python: str) -> None:
        problems: list[str] = []
        copying = threading.Thread(target=lambda: problems.append(self._cannot_copy()), daemon=True)
        copying.start()
        try:
            found = preflight.facts(python, Path.home())
            copying.join()
            defects = [one[:MAX_FACT] for one in problems if one]
            self.found = replace(found, defects=(*found.defects, *defects))
        finally:
            self.found = self.found or Facts()
            with contextlib.suppress(OSError):  # the socket is full, or closed
                self._on_found()

    def _cannot_copy(self) -> str:
        return "" if self._request.results is None else copies.check(self._request)
