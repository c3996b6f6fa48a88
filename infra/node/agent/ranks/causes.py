"""Why a rank ended, from what the kernel, the disk and torch recorded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from agent.jobs import phases
from agent.node import store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol import NOTE, RESTART_NOTE
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Observed
from cloudddp.agent.protocol.jobs import MAX_AGO, MAX_LINE, MAX_LINES, Cause, Exited, Failure, RankRecord
from cloudddp.agent.protocol.last_error import LastError, last_error

TAIL_BYTES = 1 << 16
TAIL_LINES = 2000  # in which the error is looked for
# Seconds for the rank that was lost to end, too: it closes its connections first, and takes a while to end
# after that.
SETTLE = 0.7
FULL = 0.005  # of a disk that are left, or less
KERNEL_LOG_SECONDS = 2.0
NO_SPACE = "No space left on device"
# What gloo, NCCL and the store of torch.distributed write when another rank has ended, or does not take part.
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|timed out|timeout|remote process exited"
    r"|failed to recv, got 0 bytes|ncclRemoteError|ncclSystemError|Dist(Network|Store|Backend)Error",
    re.IGNORECASE,
)
DRIVER = "/proc/driver/nvidia"
XID = re.compile(r"NVRM: Xid \(([^)]{1,60})\): (\d{1,4})")


@frozen
class Kernel:
    """Counters of the kernel before a job, to compare them with later ones."""

    oom_kills: int
    uptime: float

    @classmethod
    def now(cls) -> Kernel:
        return cls(_oom_kills(), time.clock_gettime(time.CLOCK_BOOTTIME))


@frozen
class TimedFailure:
    """A failure, and when it happened, by this node's monotonic clock."""

    at: float
    observed: Observed


def _oom_kills() -> int:
    """Return how many processes the OOM killer has ended: of the machine, and of this control group."""
    group, total = Path("/sys/fs/cgroup"), 0
    with contextlib.suppress(OSError):
        own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        group = group / own[1] if own else group
    for path in (Path("/proc/vmstat"), *(folder / "memory.events" for folder in (group, *group.parents))):
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total


def of_rank(folder: Path, node: int, record: RankRecord, before: Kernel) -> Observed:
    """Return the failure of a rank that has ended by itself."""
    lines, error = end_of_log(folder / "ranks" / f"{record.rank}.log", record.exit_code)
    cause, detail = Cause.RANK, record.error or (error.text if error.kind else "")
    code, number = record.exit_code, record.signal
    if record.signal == signal.SIGKILL and _oom_kills() > before.oom_kills:
        cause = Cause.MEMORY
    elif any(NO_SPACE in line for line in lines) and _is_full(folder):
        cause = Cause.DISK
    elif found := _xids(before):
        detail = f"NVIDIA driver: {found}" + (f"; {detail}" if detail else "")
    elif error.after_end and not error.raised:
        cause, detail = Cause.EXIT, ""
    elif error.after_end:  # Python would have exited with 1, as it does in most runs
        code, number, detail = 1, None, f"{detail}; its process aborted while exiting"
    failure = Failure(node, cause, record.rank, code, number, detail[:MAX_TEXT])
    return Observed(failure, ago_of(record.at), lines)


def of_launcher(folder: Path, node: int, code: int, before: Kernel) -> Observed:
    """Return the failure of a launcher, by its exit code as subprocess returns it. One that was killed has
    written nothing: the last lines are then those of the rank on this node that has written last."""
    number = -code if code < 0 else None
    cause = Cause.LAUNCHER
    if number == signal.SIGKILL and _oom_kills() > before.oom_kills:
        cause = Cause.MEMORY
    failure = Failure(node, cause, exit_code=128 - code if code < 0 else code, signal=number)
    lines, _ = end_of_log(folder / "launcher.log", failure.exit_code)
    if not lines and number is not None:
        lines, _ = end_of_log(max((folder / "ranks").glob("*.log"), key=phases.ctime, default=folder))
    return Observed(failure, 0.0, lines)


def ago_of(at: Optional[float]) -> float:
    """Return how many seconds ago a moment of the monotonic clock was."""
    return 0.0 if at is None else min(max(time.monotonic() - at, 0.0), MAX_AGO)


def end_of_log(path: Path, exit_code: Optional[int] = None) -> tuple[tuple[str, ...], LastError]:
    """Return the last lines of a log, each cut, without earlier attempts and notes, and the error of the
    program that exited with this code. Of many lines below the error, only the first are returned."""
    try:
        with store.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - TAIL_BYTES, 0))
            data = file.read(TAIL_BYTES)
    except OSError:
        return (), last_error((), exit_code)
    # Of a crash only the stack of the thread that has crashed, which faulthandler writes last.
    lines = re.sub(r"(?m)^Thread 0x.*\n(?:  .*\n)*", "", data.decode(errors="replace")).splitlines()
    if size > TAIL_BYTES and len(lines) > 1:
        del lines[0]  # begins in its middle
    begin = max((n for n, line in enumerate(lines, 1) if line.startswith(RESTART_NOTE)), default=0)
    lines = [line[:MAX_LINE] for line in lines[begin:] if not line.startswith(NOTE)][-TAIL_LINES:]
    error = last_error(lines, exit_code)
    end = max(error.at + MAX_LINES // 2, MAX_LINES)
    return tuple(lines[:end][-MAX_LINES:]), error


def _is_full(folder: Path) -> bool:
    """Whether a disk that jobs write to has no space left: of the home folder, or of temporary files."""
    for path in (str(folder), "/tmp", "/dev/shm"):  # noqa: S108  looked at, never written
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            if found.f_blocks and found.f_bavail <= FULL * found.f_blocks:
                return True
    return False


def _xids(before: Kernel) -> str:
    """Return the errors of NVIDIA's driver since the job began, such as `Xid 79 (PCI:0000:00:1e)`."""
    found: dict[str, None] = {}
    for line in driver_log(KERNEL_LOG_SECONDS):
        stamp, match = re.match(r"\[\s*(\d+\.\d+)\]", line), XID.search(line)
        if match and stamp and float(stamp[1]) >= before.uptime:
            found[f"Xid {match[2]} ({match[1]})"] = None
    return ", ".join(list(found)[:5])


def driver_log(seconds: float) -> list[str]:
    """Return the kernel log's lines of NVIDIA's driver, or []. Many systems let only root read it."""
    if not os.path.exists(DRIVER):
        return []
    log = run_quietly(["dmesg"], seconds) or run_quietly(["sudo", "-n", "dmesg"], seconds)
    return [line for line in log.splitlines() if "NVRM: " in line]


def elastic_error(path: str) -> str:
    """Return the message in an error file of torch.distributed.elastic, or ''."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(store.read_bytes(Path(path), 1 << 20))
        message = found.get("message") if isinstance(found, dict) else None
        text = message.get("message") if isinstance(message, dict) else message
        return str(text or "")[:2000]
    return ""


def is_consequence(observed: Observed) -> bool:
    """Whether another failure may explain this one: a rank or launcher has written that it lost a connection
    to another one, or waited for it in vain; or the script of the rank had ended."""
    failure = observed.failure
    if failure.cause not in (Cause.RANK, Cause.LAUNCHER):
        return failure.cause is Cause.EXIT
    lines = last_error(observed.last_lines, failure.exit_code).lines
    return any(LOST_PEER.search(line) for line in (*lines, failure.detail))


def exits(node: int, records: Iterable[RankRecord], stopped: float) -> tuple[Exited, ...]:
    """Return the ranks that had exited with 0 when the others were stopped, by the monotonic clock."""
    return tuple(
        Exited(node, record.rank, ago_of(record.at))
        for record in records
        if record.exit_code == 0 and not record.asked and record.at is not None and record.at <= stopped
    )


def failed_ranks(records: Iterable[RankRecord]) -> list[RankRecord]:
    """Return the ranks that have failed by themselves, the first one first."""
    found = [one for one in records if one.exit_code and not one.asked]
    return sorted(found, key=lambda one: one.at or 0.0)
