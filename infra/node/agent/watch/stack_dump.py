"""What py-spy reports of a process: as text, and where the main thread is. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.stacks import MAX_STACK, MAX_WORD, Position, RankStack

MAX_FRAMES = 400  # of one thread
MAX_DUMP = 1 << 24  # characters; a thread of 1,000 frames takes 300,000
LIBRARY = re.compile(r"/(site|dist)-packages/|/torch/|/lib(64)?/python\d|^<")
# Between torch and the script: a decorator of all collectives, and those of profilers and dynamo.
WRAPPERS = re.compile(r"(^|\.)(wrapper|inner|decorate_context|_fn|wrapped_func)$|<locals>\.")
# Native functions that wait for the other ranks: ProcessGroup and Work (c10d), gloo, NCCL.
WAITS_FOR_RANKS = re.compile(r"^(c10d::.*[wW]ait|gloo::.*[wW]ait|nccl[A-Z]|c10d::verify_params)")
# Collectives that no line of the script calls: functions in whose frames DDP waits for them.
OF_DDP = {
    "c10d::Reducer::finalize_backward": "all_reduce of DDP's gradients",
    "DistributedDataParallel._sync_buffers": "broadcast of DDP's buffers",
}
# These return when the GPU has finished: its last kernel may be a collective that waits for other ranks.
WAITS_FOR_GPU = re.compile(r"^(cuda|cu)(Stream|Device|Event|Ctx)Synchronize")


class Frame(NamedTuple):
    name: str
    file: str  # the whole path
    short: str
    line: int  # 0 in a native frame

    @property
    def is_python(self) -> bool:
        return self.line > 0

    @property
    def is_library(self) -> bool:
        return bool(LIBRARY.search(self.file))


class Thread(NamedTuple):
    name: str
    is_main: bool
    active: bool
    frames: list[Frame]  # the innermost first


def parse(data: str) -> list[Thread]:
    """Return the threads in the JSON of `py-spy dump`, the main one first. Raises ValueError."""
    if len(data) > MAX_DUMP:
        raise ValueError(f"it is longer than {MAX_DUMP >> 20} MiB")
    found = json.loads(data)
    if not isinstance(found, list):
        raise ValueError("not a list of threads")
    threads = [_thread(one) for one in found if isinstance(one, dict)]
    if not threads:
        raise ValueError("no thread of Python")
    return sorted(threads, key=lambda one: not one.is_main)


def _thread(found: dict[str, Any]) -> Thread:
    frames = found.get("frames")
    listed = [_frame(one) for one in (frames if isinstance(frames, list) else []) if isinstance(one, dict)]
    name = str(found.get("thread_name") or "")
    is_main = name == "MainThread" or found.get("os_thread_id") == found.get("pid")
    return Thread(name[:MAX_WORD], is_main, found.get("active") is True, listed[:MAX_FRAMES])


def _frame(found: dict[str, Any]) -> Frame:
    line = found.get("line")
    file = str(found.get("filename") or "")
    return Frame(
        str(found.get("name") or "")[:MAX_WORD],
        file[-MAX_WORD:],
        str(found.get("short_filename") or file)[-MAX_WORD:],
        line if type(line) is int and 0 < line < MAX_COUNT else 0,
    )


def rank_stack(rank: int, threads: list[Thread]) -> RankStack:
    """Return the stacks of a rank, of which the main thread is the first."""
    return RankStack(_position(rank, threads[0].frames), _text(threads))


def _position(rank: int, frames: list[Frame]) -> Position:
    own = next((k for k, one in enumerate(frames) if one.is_python and not one.is_library), len(frames))
    script = frames[own] if own < len(frames) else None
    called = [one for one in frames[:own] if one.is_python]  # by the script, the innermost first
    direct = next((one for one in reversed(called) if not WRAPPERS.search(one.name)), None)
    native = [one.name for one in frames[:own] if not one.is_python]
    waits = next((OF_DDP[one.name] for one in frames[:own] if one.name in OF_DDP), "")
    for_ranks = any(WAITS_FOR_RANKS.search(name) for name in native) or (
        called and "/torch/distributed/" in called[0].file
    )
    if not waits and for_ranks:
        waits = direct.name if direct else "a collective"
    elif not waits:
        waits = next((name for name in native if WAITS_FOR_GPU.search(name)), "")
    inside = f"{direct.name} ({direct.short}:{direct.line})" if direct else ""
    return Position(
        rank,
        waits=waits,
        function=script.name if script else "",
        file=script.short if script else "",
        line=script.line if script else 0,
        inside="" if waits else inside[:MAX_WORD],
    )


def _text(threads: list[Thread]) -> str:
    lines = []
    for thread in threads:
        lines.append(f"thread {thread.name or 'without a name'} ({'active' if thread.active else 'idle'})")
        lines += [
            f"    {one.name} ({one.short}{f':{one.line}' if one.line else ''})" for one in thread.frames
        ]
    return "\n".join(lines)[:MAX_STACK]
