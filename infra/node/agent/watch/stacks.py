"""The stacks of a job's ranks on this node, and what NCCL reports of all ranks. Both are kept in the job's
folder, which `pull` copies."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Optional

from agent.jobs import rank_records
from agent.node import kernel, processes, store
from agent.ranks import launchers
from agent.watch import py_spy, ras
from cloudddp.agent.protocol.codec import is_plain
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.stacks import MAX_STACK, MAX_WORD, Position, RankStack, StacksReply

FOLDER = "stacks"  # in a job's folder
AT_ONCE = 8  # ranks of which py-spy reads the stack at the same time
MISSING = (
    "py-spy is missing, so that stacks are less exact: only the kernel's state of the threads is known; "
    "`launch` sends it from a computer that has cloudddp[stacks]"
)
RAS = "nccl-ras.txt"  # beside the stacks
DUMP_SECONDS, DUMP_PAUSE = 3.0, 0.1  # for PyTorch to write a dump that was asked for; between two looks
CANDIDATES = 3  # processes of a rank to try: the script may have been started by a shell


def gather(folder: Path) -> StacksReply:
    """Return the stacks of the ranks here, and what NCCL's RAS reports, after writing both to files."""
    from concurrent.futures import ThreadPoolExecutor  # 10 ms, for few jobs

    asked = time.time()
    dumps = ask_flight_recorder(folder)
    records = rank_records.running(folder)
    tool = py_spy.install(python_of(records[0])) if records else ""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stacks = tuple(pool.map(lambda record: _stack(tool, record), records))
    report = ras.ask(*ras.address(records[0].pid or 0)) if records else ""
    with contextlib.suppress(OSError):  # a full disk
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        for stack in stacks:
            store.replace(
                folder / FOLDER / f"{stack.position.rank}.txt", stack.text.encode(errors="replace") + b"\n"
            )
        if report:
            store.replace(folder / FOLDER / RAS, report.encode(errors="replace"))
    _await(dumps, asked)
    return StacksReply(stacks, nccl=ras.summary(report))


def ask_flight_recorder(folder: Path) -> list[Path]:
    """Ask PyTorch for dumps by the pipe that a rank with NCCL reads; return the files that it will write."""
    asked = []
    for path in (folder / launchers.PIPES).glob("*.pipe"):
        with contextlib.suppress(OSError):  # nobody reads it
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                os.write(descriptor, b"1\n")
                asked.append(folder / launchers.DUMPS / path.stem)
            finally:
                os.close(descriptor)
    return asked


def _await(dumps: list[Path], since: float) -> None:
    """Wait a moment for dumps that are written after a time."""
    end = time.monotonic() + DUMP_SECONDS
    while any(not path.exists() or path.stat().st_mtime < since for path in dumps):
        if time.monotonic() > end:
            return
        time.sleep(DUMP_PAUSE)


def python_of(record: RankRecord) -> str:
    """Return the program of a rank, which is its Python unless a shell started it; '' if that is unknown."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{record.pid}/cmdline").read_bytes().split(b"\0")
        found = os.fsdecode(words[0])
        if os.path.basename(found).startswith("python"):
            return found
    return ""


def _stack(tool: str, record: RankRecord) -> RankStack:
    reason = MISSING
    for pid in processes.tree(record.pid or 0)[:CANDIDATES] if tool else ():
        threads, reason = py_spy.dump(tool, pid)
        if threads:
            return py_spy.rank_stack(record.rank, threads)
        if reason == py_spy.STUCK:  # a child's stack would pass for its own
            break
    position = Position(record.rank, error=reason[:MAX_WORD])
    return RankStack(position, f"{reason}\n{_kernel_state(record.pid)}"[:MAX_STACK])


def _kernel_state(pid: Optional[int]) -> str:
    """Return the state of a process's threads, and in which function of the kernel each waits."""
    lines = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            with contextlib.suppress(OSError, IndexError):
                base = f"/proc/{pid}/task/{entry}"
                name = Path(base, "comm").read_text(errors="replace").strip()
                state = kernel.stat(int(entry))[0]
                waits = Path(base, "wchan").read_text(errors="replace")
                lines.append(
                    f"thread {name}: state {state}"
                    + (f", in {waits}" if is_plain(waits, "_") and waits != "0" else "")
                )
    return "\n".join(lines)
