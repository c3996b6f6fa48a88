"""A failure in words: for the laptop, and for what a node sends where nobody is connected. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cloudddp.agent.protocol.jobs import Cause, Failure

SHORTEST_SECRET = 6  # characters; shorter values, such as `8` and `gloo`, are also usual words

# Linux's numbers on x86-64 and arm64: the nodes' numbers, where the laptop's may be those of macOS.
_SIGNALS = """
    SIGHUP SIGINT SIGQUIT SIGILL SIGTRAP SIGABRT SIGBUS SIGFPE SIGKILL SIGUSR1 SIGSEGV SIGUSR2 SIGPIPE
    SIGALRM SIGTERM SIGSTKFLT SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGXCPU SIGXFSZ
    SIGVTALRM SIGPROF SIGWINCH SIGIO SIGPWR SIGSYS
""".split()


def signal_name(number: int) -> str:
    return _SIGNALS[number - 1] if 1 <= number <= len(_SIGNALS) else f"signal {number}"


def masked(text: str, values: Iterable[str], cut_at: int = 0) -> str:
    """Return a text without these values and without each of their lines, which may be secret. Lines of
    `cut_at` characters may have been cut in a value."""
    parts = {
        part for value in values for part in (value, *value.splitlines()) if len(part) >= SHORTEST_SECRET
    }
    ordered = sorted(parts, key=len, reverse=True)
    lines = (_before_cut(one, ordered) if len(one) == cut_at else one for one in text.split("\n"))
    text = "\n".join(lines)
    for part in ordered:
        text = text.replace(part, "****")
    return text


def _before_cut(line: str, values: Iterable[str]) -> str:
    """Return a line without the beginning of a value at its end."""
    sizes = range(len(line), SHORTEST_SECRET - 1, -1)
    size = next((one for one in sizes if any(value.startswith(line[-one:]) for value in values)), 0)
    return line[: len(line) - size] + "****" * bool(size)


def what_failed(failure: Failure, detail: str) -> str:
    """Return what failed, in words: `rank 2 on node 1 was killed by SIGKILL`. `detail` is the failure's own,
    made safe to print."""
    node, rank = f"node {failure.node}", f"rank {failure.rank} on node {failure.node}"
    detail = f": {detail}" if detail else ""
    other = "another node" if failure.peer is None else f"node {failure.peer}"
    code = "" if failure.exit_code is None else f" with code {failure.exit_code}"
    how = f"was killed by {signal_name(failure.signal)}" if failure.signal else f"exited{code}"
    who = rank if failure.rank is not None else f"the launcher (torchrun) on {node}"
    return {
        Cause.RANK: f"{rank} {how}{detail}",
        Cause.EXIT: f"{rank} {how}: the script had ended; torch aborted while exiting: call "
        "dist.destroy_process_group()",
        Cause.MEMORY: f"{who} was killed by the kernel's OOM killer: {node} has run out of memory{detail}",
        Cause.DISK: f"{rank} failed{code}: no space is left on a disk of {node}{detail}",
        Cause.LAUNCHER: f"{node}: the launcher (torchrun) {how} before its ranks had finished{detail}",
        Cause.START: f"{node}: the ranks could not be started{detail}",
        Cause.AGENT: f"{node}: the agent of cloudddp has ended there, without a report{detail}",
        Cause.SILENT: f"{node} was lost: it sent nothing to {other}{detail}",
        Cause.STALL: f"the job has stalled{f' at {rank}' if failure.rank is not None else ''}{detail}",
        Cause.NOTICE: f"{node} is about to end{detail}; the ranks were told to save",
        Cause.SNAPSHOT: f"{node}: the ranks could not continue from the newest snapshot{detail}",
        Cause.PREFLIGHT: f"no rank was started{detail}",
        Cause.UNREACHABLE: f"{node} was not connected to {other}, so no rank was started{detail}",
    }[failure.cause]
