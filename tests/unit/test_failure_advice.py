"""The error in what a rank has written last, and the advice for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.agent.protocol.last_error import last_error
from cloudddp.job.failure_text import advice
from cloudddp.job.project_scan import import_advice


def advised(line: str, *, simulated: bool = False, environment: str = "", listed: bool = False) -> str:
    return advice(
        last_error(["Traceback", line]),
        simulated=simulated,
        environment=environment,
        listed=listed,
        why_missing=lambda name: "data/a.bin is here" if name == "data/a.bin" else "",
    )


NO_MODULE = "ModuleNotFoundError: No module named "


@pytest.mark.parametrize(
    ("line", "environment", "listed", "expected"),
    [
        (f"{NO_MODULE}'hydra'", "", False, "list the package that provides hydra in requirements.txt"),
        (f"{NO_MODULE}'hydra.core'", "uv.lock", False, 'add [setup] environment = "uv.lock"'),
        (
            "/opt/python3: No module named pkg",
            "req.txt",
            True,
            "add the package that provides pkg to req.txt",
        ),
    ],
)
def test_missing_module(line: str, environment: str, listed: bool, expected: str) -> None:
    for simulated in (False, True):
        assert expected in advised(line, simulated=simulated, environment=environment, listed=listed)


@pytest.mark.parametrize(
    ("line", "simulated", "expected"),
    [
        (f"{NO_MODULE}'torch'", True, "install torch on this computer"),
        (f"{NO_MODULE}'torch.distributed'", False, "the package that provides torch"),
        ("t.py: error: the following arguments are required: --x, --local_rank", False, "LOCAL_RANK"),
        ("t.py: error: the following arguments are required: --local-rank", False, "LOCAL_RANK"),
        ("RuntimeError: Found no NVIDIA driver on your system.", True, "have no GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system.", False, ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/a.bin'", False, "data/a.bin is here"),
        ("[rank1]: RuntimeError: No such file or directory: 'data/a.bin'", False, "data/a.bin is here"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'other'", False, ""),
        ("FileNotFoundError: Checkpoint file not found: data/a.bin. Aborting.", False, "data/a.bin is here"),
        ('Error: No such file or directory (os error 2): "data/a.bin"', False, "data/a.bin is here"),
        ("cat: data/a.bin: No such file or directory", False, "data/a.bin is here"),
        ("ValueError: No module named x is fine", False, ""),
        ("EOFError: EOF when reading a line", False, "ranks have no stdin"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
            False,
            "/dev/shm",
        ),
        ("RuntimeError: unable to write to file </torch_1>: No space left on device (28)", False, "/dev/shm"),
    ],
)
def test_advice(line: str, simulated: bool, expected: str) -> None:
    found = advised(line, simulated=simulated)
    assert expected in found
    assert bool(found) == bool(expected)


NO_PARENT = "ImportError: attempted relative import with no known parent package"
MISSING = f"[rank0]: {NO_MODULE}"
FRAMES = ' File "/x/a.py", line 1, in x\n File "/x/project/{}", line 2, in y\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FRAMES.format("src/mylm/train.py") + NO_PARENT, "as `-m mylm.train`, and add [job] env = {"),
        (FRAMES.format("my/train.py") + NO_PARENT, "start it as `-m my.train`"),
        (FRAMES.format("train.py") + NO_PARENT, ""),  # in no package
        (FRAMES.format("../my/train.py") + NO_PARENT, ""),
        (f"{MISSING}'mylm'", 'PYTHONPATH = "src" } to cloudddp.toml; or `-e .` in the requirements.txt'),
        ("/opt/py/bin/python3: No module named helpers", 'PYTHONPATH = "libs/one"'),
        (f"{MISSING}'train'", 'PYTHONPATH = "."'),
        (f"{MISSING}'mylm.data'", ""),  # the folder is not the reason
        (f"{MISSING}'hydra'", ""),
        ("PackageNotFoundError: No package metadata was found for my-lm", "on the nodes: `-e .` in"),
    ],
)
def test_modules_of_the_project(tmp_path: Path, text: str, expected: str) -> None:
    files = "pyproject.toml train.py src/mylm/train.py src/my_lm/a.py my/train.py libs/one/helpers.py"
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = import_advice(text.splitlines(), tmp_path)
    assert expected in found
    assert bool(found) == bool(expected)


HEAD = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    f()"]
VALUE, NAME = ["step 11", *HEAD, "ValueError: x"], ["step 11", *HEAD, "NameError: x"]
OF_TORCH = [f"[rank3]: {line}" for line in VALUE]
GROUP = ["  + Exception Group " + HEAD[0], "  | " + HEAD[1], "  | ExceptionGroup: x", "  +-+--- 1 ---"]
DUMP = ["Fatal Python error: Aborted", "", "Thread 0x00007f (most recent call first):"]
AT_EXIT = [*DUMP, "  <no Python frame>", "", "Extension modules: numpy (total: 1)"]
RUNNING = [*DUMP, '  File "/x/t.py", line 30 in <module>']
UNWOUND = "terminate called without an active exception"
THROWN = ["terminate called after throwing an instance of 'c10::Error'", "  what():  watchdog of 3"]
THROWN += [f"frame #{number}: c10::f() + 0x51 (0x7f in /x/libc10.so)" for number in range(30)]


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (VALUE, 1, "ValueError: x"),
        (["[default0]:" + line for line in NAME], 1, "NameError: x"),
        (["2026-11-29 02:38:34,123 " + line for line in NAME], 1, "NameError: x"),
        (['  File "t.py", line 1', "    x = = 1", "        ^", "SyntaxError: x"], 1, "SyntaxError: x"),
        ([*VALUE, "During handling of the above exception, x", *HEAD, "a.Stop", "note"], 1, "a.Stop"),
        ([*GROUP, "    | ImportError: y"], 1, "ImportError: y"),
        ([*VALUE, "/x/resource_tracker.py:2: UserWarning: x", "  warnings.warn("], 1, "ValueError: x"),
        ([*VALUE, "Exception ignored in: <f>", *HEAD, "NameError: y"], 1, "ValueError: x"),
        ([*OF_TORCH, "[rank3]:[W1129 P.cpp:15] x", *THROWN], 134, "ValueError: x"),
        ([*OF_TORCH, UNWOUND, *AT_EXIT], 134, "ValueError: x"),
        ([*NAME, *[f"step {number}" for number in range(12)]], 1, "step 11"),  # the script continued
        ([*NAME, "step 12"], 137, "step 12"),  # it was killed
        ([*NAME, *THROWN, *RUNNING], 134, "c10::Error: watchdog of 3"),
        ([*NAME, *RUNNING], 139, "Fatal Python error: Aborted"),
        (["step 3", "give --config"], 1, "give --config"),  # sys.exit("give --config")
        ([], 1, ""),
        # Whether it has crashed after the end of its script:
        (["finished", UNWOUND], 134, True),  # faulthandler has ended before
        (["finished", *THROWN, *AT_EXIT], 134, True),
        (["finished", *AT_EXIT], 139, True),
        ([UNWOUND, *RUNNING], 134, False),
        ([*DUMP, "  ..."], 139, False),  # too deep to show where it was
        (THROWN, 134, False),  # faulthandler is off, or has ended: unknown
        (AT_EXIT, 1, False),  # of another process
    ],
)
def test_error(lines: list[str], code: int, expected: str | bool) -> None:
    found = last_error(lines, code)
    assert (found.after_end if isinstance(expected, bool) else found.text) == expected
