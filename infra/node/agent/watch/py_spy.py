"""py-spy on this node: where it is, getting it, the stacks of a process, and where its main thread is.

It reads the memory of another process (ptrace). Ubuntu allows that to the process's ancestors only
(kernel.yama.ptrace_scope = 1), so it is repeated with sudo where it was refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from agent.node import kernel, store
from agent.node.commands import outcome, run_quietly
from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.stacks import MAX_STACK, MAX_TOOL, MAX_WORD, TOOLS, Position, RankStack

NAME = "py-spy"
INSTALLED = "tools/installed"  # below the agent's folder
INSTALL_SECONDS = 60.0
STUCK = "it waits for a disk or a file server, so that py-spy cannot read its stack"
DUMP_SECONDS = 40.0  # of one attempt; symbols of libtorch take two on an idle machine
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
REFUSED = ("Permission", "permission", "Operation not permitted", "root")


def shipped() -> Path:
    """Return where the laptop puts py-spy."""
    return store.project_folder(TOOLS) / NAME


def platform() -> str:
    """Return what kind of program runs on this node, such as linux-x86_64."""
    return f"linux-{os.uname().machine}"


def shipped_digest() -> str:
    """Return the SHA-256 of what the laptop has put here, '' if that is nothing."""
    try:
        return hashlib.sha256(store.read_bytes(shipped(), MAX_TOOL)).hexdigest()
    except OSError:
        return ""


def find(python: str) -> str:
    """Return the path of py-spy, or '': the laptop's, or that of an environment of Python, or pip's."""
    beside = [Path(python).with_name(NAME)] if "/" in python else []
    places = [shipped(), *beside, store.ROOT / INSTALLED / "bin" / NAME]
    return next((str(place) for place in places if os.access(place, os.X_OK)), shutil.which(NAME) or "")


def install(python: str) -> str:
    """Get py-spy with the pip of a Python, into a folder of its own: the job's environment stays as it is
    (PEP 668 does not concern --target). Return its path, '' without pip or network."""
    if found := find(python):
        return found
    folder = store.ROOT / INSTALLED
    options = """
        --quiet --no-deps --only-binary :all: --upgrade --disable-pip-version-check --timeout 5 --retries 0
    """.split()
    command = [python or "python3", "-m", "pip", "install", *options, "--target", str(folder), NAME]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        run_quietly(command, INSTALL_SECONDS)
    return find(python)


def dump(tool: str, pid: int) -> tuple[list[Thread], str]:
    """Return the threads of a process, with native frames where possible; or none, and the reason."""
    reason = ""
    for words in (["--native"], []):
        for sudo in ([], ["sudo", "-n"]):
            command = [*sudo, tool, "dump", "--pid", str(pid), "--json", *words]
            output, reason = _run(command)
            if output:
                try:
                    return parse(output), ""
                except (ValueError, RecursionError) as error:
                    reason = f"the output of {NAME} cannot be read: {error}"
            if sudo or not any(word in reason for word in REFUSED):
                break
        if kernel.stat(pid)[:1] == ["D"]:  # nothing stops it, and so no other attempt would end in time
            return [], STUCK
    return [], reason


def _run(command: list[str]) -> tuple[str, str]:
    """Return a command's output, and the last line of its errors if it fails."""
    code, out, errors = outcome(command, DUMP_SECONDS)
    if code == 0:
        return out, ""
    lines = errors.strip().splitlines() or [f"{NAME} exited with {code}"]
    return "", next(
        (line for line in reversed(lines) if "reason" in line.lower() or "rror" in line), lines[-1]
    )


# -- what it reports of a process: pure ----------------------------------------------------------------------


class StackFrame(NamedTuple):
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
    frames: list[StackFrame]  # the innermost first


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


def _frame(found: dict[str, Any]) -> StackFrame:
    line = found.get("line")
    file = str(found.get("filename") or "")
    return StackFrame(
        str(found.get("name") or "")[:MAX_WORD],
        file[-MAX_WORD:],
        str(found.get("short_filename") or file)[-MAX_WORD:],
        line if type(line) is int and 0 < line < MAX_COUNT else 0,
    )


def rank_stack(rank: int, threads: list[Thread]) -> RankStack:
    """Return the stacks of a rank, of which the main thread is the first."""
    return RankStack(_position(rank, threads[0].frames), _text(threads))


def _position(rank: int, frames: list[StackFrame]) -> Position:
    own = next((k for k, one in enumerate(frames) if one.is_python and not one.is_library), len(frames))
    script = frames[own] if own < len(frames) else None
    called = [frame for frame in frames[:own] if frame.is_python]  # by the script, the innermost first
    direct = next((one for one in reversed(called) if not WRAPPERS.search(one.name)), None)
    native = [frame.name for frame in frames[:own] if not frame.is_python]
    waits = next((OF_DDP[frame.name] for frame in frames[:own] if frame.name in OF_DDP), "")
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
            f"    {frame.name} ({frame.short}{f':{frame.line}' if frame.line else ''})"
            for frame in thread.frames
        ]
    return "\n".join(lines)[:MAX_STACK]
