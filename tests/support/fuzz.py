"""Runs the random cases of fuzz_cases.py.

    python tests/support/fuzz.py FIRST END FOLDER ENDPOINT    write their outcomes to FOLDER/outcomes

Each case is a process of its own, forked from one that has imported what cloudddp needs, with its own folder,
environment, stdin, stdout and stderr. `cloudddp.__main__.main` runs in it and ends it, as it does in any
other.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from support.fuzz_cases import Case, generate

HANG = 120  # seconds until a case counts as one that does not end
_AT_ONCE = 3


def lay_out(case: Case, folder: Path) -> Path:
    """Create the folder of a case; return its current folder."""
    project = folder / "a" / "b" / "project"
    project.mkdir(parents=True)
    (project / "folder").mkdir()
    (project / "file").write_text("text\n")
    (project / "train.py").write_text("print(1)\n")
    (project / "main.py").write_text("print(1)\n")
    (project / "unreadable").touch(0o000)
    (project / "odd.toml").write_bytes(case.toml or b"[cluster\n")
    (project / "link").symlink_to("file")
    (project / "loop").symlink_to("loop")
    (project / "dangling").symlink_to("nowhere")
    (project / "null").symlink_to("/dev/null")
    os.mkfifo(project / "fifo")
    config = project / "cloudddp.toml"
    if case.toml is not None:
        config.write_bytes(case.toml)
    elif case.toml_is == "folder":
        config.mkdir()
    elif case.toml_is == "fifo":
        os.mkfifo(config)
    elif case.toml_is == "unreadable":
        config.touch(0o000)
    elif case.toml_is != "none":
        config.symlink_to({"loop": "cloudddp.toml", "dangling": "nowhere", "null": "/dev/null"}[case.toml_is])
    if case.git == "folder":
        (project / ".git").mkdir()
        (project / ".gitignore").write_bytes(case.toml or b"\xff\n[\n!\n")
    elif case.git == "file":
        (project / ".git").write_bytes(b"\xff")
    elif case.git == "loop":
        (project / ".git").symlink_to(".git")
    start = project / case.cwd if case.cwd == "folder" else project
    if case.cwd == "gone":
        start = project / "gone"
        start.mkdir()
    return start


def environment(case: Case, folder: Path, endpoint: str) -> dict[str, str]:
    mine = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CLOUDDDP_HOME": str(folder / "state"),
        "CLOUDDDP_CHECKIP_URL": f"{endpoint}/address",
        "AWS_ENDPOINT_URL": f"{endpoint}/{case.seed}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "OMP_NUM_THREADS": "1",
    }
    mine.update({name: value for name, value in case.variables.items() if value is not None})
    return {name: value for name, value in mine.items() if case.variables.get(name, "") is not None}


def start(case: Case, folder: Path, endpoint: str) -> int:
    """Fork; return the pid, and in the new process, set up for the case, 0."""
    begin = lay_out(case, folder)
    (folder / "stdin").write_bytes(case.stdin)
    if pid := os.fork():
        return pid
    os.setsid()
    os.chdir(begin)
    if case.cwd == "gone":
        begin.rmdir()
    for number, name, how in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        handle = os.open(folder / name, how | os.O_CREAT, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    mine = environment(case, folder, endpoint)
    os.environ.clear()
    os.environ.update(mine)
    sys.argv = ["cloudddp", *case.words]
    signal.alarm(HANG)
    return 0


def serve(first: int, end: int, folder: Path, endpoint: str) -> bool:
    """Run the cases; return False in each of their processes, and True when all have ended."""
    for module in ("asyncssh", "moto.ec2.models", "support.warm"):  # what every case imports
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or every collection in a child copies all of it
    running: dict[int, int] = {}
    outcomes = []
    for seed in [*range(first, end), None]:
        while running and (seed is None or len(running) >= _AT_ONCE):
            pid, status = os.wait()
            outcomes.append({"seed": running.pop(pid), "code": os.waitstatus_to_exitcode(status)})
        if seed is None:
            break
        place = folder / str(seed)
        place.mkdir()
        pid = start(generate(seed), place, endpoint)
        if not pid:
            return False
        running[pid] = seed
    (folder / "outcomes").write_text(json.dumps(outcomes))
    return True


def end_as_a_program() -> None:
    """Run the command line and exit as Python does, without tearing down modules, which takes half a
    second."""
    from cloudddp.__main__ import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        code = 120
    os._exit(code)


def outcomes(folder: Path) -> Iterator[tuple[Case, int, bytes, bytes]]:
    """Each case with its exit code, stdout and stderr."""
    for one in json.loads((folder / "outcomes").read_text()):
        place = folder / str(one["seed"])
        yield (
            generate(one["seed"]),
            one["code"],
            (place / "stdout").read_bytes(),
            (place / "stderr").read_bytes(),
        )


if __name__ == "__main__":
    if not serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]):
        end_as_a_program()
