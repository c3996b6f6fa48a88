"""Known reasons of failures lead to a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.agent.protocol.last_error import last_error
from cloudddp.job.failure_text import advice
from cloudddp.job.project_scan import import_advice


@pytest.mark.parametrize(
    ("line", "environment", "listed", "expected"),
    [
        (
            "ModuleNotFoundError: No module named 'hydra'",
            "",
            False,
            "list the package that provides hydra in requirements.txt",
        ),
        (
            "ModuleNotFoundError: No module named 'hydra.core'",
            "uv.lock",
            False,
            'add [setup] environment = "uv.lock"',
        ),
        (
            "/opt/py/bin/python3: No module named pkg",
            "req.txt",
            True,
            "add the package that provides pkg to req.txt",
        ),
    ],
)
def test_missing_module(line: str, environment: str, listed: bool, expected: str) -> None:
    for simulated in (False, True):
        found = advice(
            last_error(["Traceback", line]),
            simulated=simulated,
            environment=environment,
            listed=listed,
            why_missing=lambda _: "",
        )
        assert expected in found


@pytest.mark.parametrize(
    ("line", "simulated", "expected"),
    [
        ("ModuleNotFoundError: No module named 'torch'", True, "install torch on this computer"),
        (
            "ModuleNotFoundError: No module named 'torch.distributed'",
            False,
            "the package that provides torch",
        ),
        ("t.py: error: the following arguments are required: --x, --local_rank", False, "LOCAL_RANK"),
        ("t.py: error: the following arguments are required: --local-rank", False, "LOCAL_RANK"),
        ("RuntimeError: Found no NVIDIA driver on your system.", True, "have no GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system.", False, ""),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/a.bin'",
            False,
            "data/a.bin is here",
        ),
        (
            "[rank1]: RuntimeError: No such file or directory: 'data/a.bin'",
            False,
            "data/a.bin is here",
        ),
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
        (
            "RuntimeError: unable to write to file </torch_19_3_0>: No space left on device (28)",
            False,
            "/dev/shm",
        ),
    ],
)
def test_advice(line: str, simulated: bool, expected: str) -> None:
    found = advice(
        last_error(["Traceback", line]),
        simulated=simulated,
        environment="",
        listed=False,
        why_missing=lambda name: "data/a.bin is here" if name == "data/a.bin" else "",
    )
    assert expected in found
    assert bool(found) == bool(expected)


NO_PARENT = "ImportError: attempted relative import with no known parent package"
MISSING = "[rank0]: ModuleNotFoundError: No module named "
FRAMES = ' File "/x/a.py", line 1, in x\n File "/x/project/{}", line 2, in y\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            FRAMES.format("src/mylm/train.py") + NO_PARENT,
            "start it as `-m mylm.train`, and add [job] env = {",
        ),
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
