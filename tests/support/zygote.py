"""Forks Python programs on demand from a process that has already imported what they need.

Imports are most of what a short program costs. `zygote.py SOCKET MODULE...` imports the modules and serves
requests on the socket with that number. Each request becomes a real process: a pid, signals, an exit code,
its own environment, folder and descriptors. A request is JSON {"argv", "env", "cwd", "session", "closed"}
with four descriptors: stdin, stdout, stderr, and a pipe for the answer: a line with the pid and, when the
process has ended, a line with its exit code (as subprocess.Popen reports it) and its peak memory in KiB.
`argv` is what follows `python`: `-m` and a module, `-c` and a program, or a script. No module may start a
thread, because fork does not copy threads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 1 << 20  # bytes of a request: the environment is the most of it


def main(number: int, modules: list[str]) -> None:
    """Serve until the socket's other end is closed."""
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the test process
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    answers: dict[int, int] = {}  # pid -> its pipe
    requests = socket.socket(fileno=number)
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not requests:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                    report_ended(answers)
                    continue
                message, handles, *_ = socket.recv_fds(requests, LARGEST, 4)
                if not message:
                    return
                *streams, answer = handles
                pid = os.fork()
                if not pid:
                    # not os.close: the object would later close a descriptor that reuses its number
                    ready.close()
                    for handle in (requests.detach(), woken, wake, *answers.values()):
                        os.close(handle)
                    become(streams, answer, **json.loads(message))
                for handle in streams:
                    os.close(handle)
                answers[pid] = answer


def answer_with(handle: int, *numbers: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller no longer waits
        os.write(handle, " ".join(map(str, numbers)).encode() + b"\n")


def report_ended(answers: dict[int, int]) -> None:
    """Report the exit code and the peak memory of each process that has ended."""
    while answers:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        handle = answers.pop(pid)
        answer_with(handle, os.waitstatus_to_exitcode(status), usage.ru_maxrss)
        os.close(handle)


def become(
    streams: list[int],
    answer: int,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    session: bool,
    closed: list[int],
) -> None:
    """Run the requested program in this forked process and exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session:
        os.setsid()
    answer_with(answer, os.getpid())  # only now: once the pid is known, its session may be signalled
    os.close(answer)
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(cwd)
    if env.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in closed:
            os.close(number)
        stream = None if number in closed else text_stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    run_to_the_end(argv)


def run_to_the_end(argv: list[str]) -> NoReturn:
    """Run the program and exit as the interpreter does, but without freeing every object: that would copy all
    the memory which is shared with the zygote, and takes longer than most programs."""
    try:
        run(argv)
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter fails to write it, too, and has an exit code for that
    os._exit(code)


def text_stream(number: int) -> Any:
    """Return sys.stdin, stdout or stderr for a descriptor, as the interpreter makes it when it starts."""
    return open(
        number,
        "w" if number else "r",
        encoding="utf-8",
        errors="strict" if number < 2 else "backslashreplace",
        buffering=1 if number == 2 or os.isatty(number) else -1,
        closefd=False,
    )


def run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        module = sys.modules.get(f"{argv[1]}.__main__")
        if module is None:
            sys.path[0] = os.getcwd()  # noqa: PTH109
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = str(module.__file__)
            module.main()
    elif argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        sys.path[0] = ""
        exec(argv[1], {"__name__": "__main__"})  # noqa: S102
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
