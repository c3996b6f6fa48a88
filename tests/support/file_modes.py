"""File modes apply to root, too, without two capabilities (capabilities(7)): tests of files that may not be
read run as any user."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from support.programs import program

T = TypeVar("T")
_VERSION_3 = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


def _drop() -> None:
    """Drop them from the effective and the permitted set of this thread: for root, access(2) takes the
    permitted one."""
    libc, header, sets = ctypes.CDLL(None, use_errno=True), _Header(_VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0].effective &= ~_OVERRIDES
    sets[0].permitted &= ~_OVERRIDES
    if libc.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")


def applied_to(work: Callable[[], T]) -> T:
    """Return the result of `work`, which may read and write what the modes of files allow. Programs that it
    starts have root's capabilities again."""
    with ThreadPoolExecutor(1, initializer=_drop) as thread:
        return thread.submit(work).result()


def with_modes_applied(folder: Path, program_there: str = sys.executable) -> str:
    """Return a program that is this Python, or another program, and to which the modes of files apply."""
    if os.geteuid():
        return program_there
    dropped = " ".join(f"{sets}=-dac_override,-dac_read_search" for sets in ("--bounding-set", "--inh-caps"))
    text = f'exec setpriv {dropped} {program_there} "$@"'
    return str(program(folder / Path(program_there).name, text))
