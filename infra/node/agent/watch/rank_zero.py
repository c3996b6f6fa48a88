"""What rank 0 shows of a training on this node without reporting it: the newest scalars in TensorBoard's
event files, and the last line of its log. Of files only the ends are read, and a search has a time limit: a
project may have millions of files, and an event file may have any size."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.files.scan import Scan
from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol import event_files
from cloudddp.agent.protocol.readings import MAX_METRICS, MAX_SHOWN_LINE, Reading

SEARCH_SECONDS, AGAIN_SECONDS = 1.0, 10.0  # of a search, and between two
MAX_FILES = 8  # the newest; add_scalars writes one for each curve
FILE_BYTES, LOG_BYTES = 1 << 15, 1 << 14  # of the end of a file


class RankZero:
    """Rank 0 of a job. `project` is the folder of its files."""

    def __init__(self, folder: Path, project: Path) -> None:
        self._project = project
        self._log = folder / "ranks" / "0.log"
        self._since = phases.began_at(folder)
        self._files: list[Path] = []
        self._searched = float("-inf")
        self._newest: dict[str, Optional[float]] = {}

    def added(self, reading: Reading) -> Reading:
        """Return a reading with what rank 0 shows, where it runs here."""
        if not os.path.lexists(self._log):
            return reading
        reports = reading.metrics.keys() - {"step", "steps"}
        metrics = reading.metrics if reports else self._scalars() or reading.metrics
        return replace(reading, metrics=metrics, line=self._last_line())

    def _scalars(self) -> dict[str, Optional[float]]:
        """Return the newest value of each scalar that was written since the job began, the first ones of too
        many; None for NaN and infinity."""
        if time.monotonic() - self._searched >= AGAIN_SECONDS:
            new = Scan(self._project, (), (), self._since, again=0, seconds=SEARCH_SECONDS)
            found = sorted((one.ctime, one.found.name) for one in new if event_files.EVENTS in one.found.name)
            self._files = [self._project / name for _, name in found[-MAX_FILES:]]
            self._searched = time.monotonic()
        for path in self._files:
            with contextlib.suppress(OSError), store.open_regular(path) as file:
                for row in event_files.last_rows(file, FILE_BYTES):
                    if row.at >= self._since / 1e9 - 1:  # clocks of file systems lag
                        for tag, value in row.values.items():
                            if tag in self._newest or len(self._newest) < MAX_METRICS:
                                self._newest[tag] = value if math.isfinite(value) else None
        return dict(self._newest)

    def _last_line(self) -> str:
        """Return the last line of its log that is not blank, and the last state of a progress bar."""
        with contextlib.suppress(OSError), store.open_regular(self._log) as file:
            begin = max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0)
            text = os.pread(file.fileno(), LOG_BYTES, begin).decode(errors="replace").rstrip()
            return re.split(r"[\r\n]", text)[-1].strip()[:MAX_SHOWN_LINE]
        return ""
