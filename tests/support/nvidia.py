"""A stand-in for nvidia-smi: lists GPUs, or prints them as `--query-gpu` does, every `-lms` milliseconds."""

from __future__ import annotations

from pathlib import Path

from support.programs import program

# Without a process for each pause, so that what it costs is not counted for what reads it.
_TEXT = """#!/bin/sh
case "$1" in -L) seq -f "GPU %g: a stand-in" 0 {last}; exit ;; esac
exec python3 -ISc '
import sys, time
pause = int(sys.argv[sys.argv.index("-lms") + 1]) / 1000
while True:
    for index in range({count}):
        print(f"{{index}}, {{90 + index}}, {{70000 + index}}, 81559, 61, 650.{{index}}2, 40")
    sys.stdout.flush()
    time.sleep(pause)
' "$@"
"""


def install(folder: Path, count: int) -> Path:
    """Put it into a folder of PATH, with so many GPUs."""
    return program(folder / "nvidia-smi", _TEXT.format(count=count, last=count - 1))
