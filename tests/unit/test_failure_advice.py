"""Known reasons of failures lead to a sentence that says what to do."""

from __future__ import annotations

import pytest

from cloudddp.job.failure_text import advice


@pytest.mark.parametrize(
    ("line", "simulated", "requirements", "expected"),
    [
        ("ModuleNotFoundError: No module named 'hydra'", False, False, 'run = ["pip install hydra"]'),
        ("ModuleNotFoundError: No module named 'hydra.core'", True, True, "pip install -r requirements.txt"),
        ("/opt/py/bin/python3: No module named pkg", False, False, "pip install pkg"),
        ("ModuleNotFoundError: No module named 'torch'", True, False, "install torch on this computer"),
        ("ModuleNotFoundError: No module named 'torch.distributed'", False, False, "pip install torch"),
        ("t.py: error: the following arguments are required: --x, --local_rank", False, False, "LOCAL_RANK"),
        ("t.py: error: the following arguments are required: --local-rank", False, False, "LOCAL_RANK"),
        ("RuntimeError: Found no NVIDIA driver on your system.", True, False, "have no GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system.", False, False, ""),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/a.bin'",
            False,
            False,
            "data/a.bin is here",
        ),
        (
            "[rank1]: RuntimeError: No such file or directory: 'data/a.bin'",
            False,
            False,
            "data/a.bin is here",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'other'", False, False, ""),
        ("ValueError: No module named x is fine", False, False, ""),
    ],
)
def test_advice(line: str, simulated: bool, requirements: bool, expected: str) -> None:
    found = advice(
        ["Traceback", line],
        simulated=simulated,
        has_requirements=requirements,
        why_unsent=lambda name: "data/a.bin is here" if name == "data/a.bin" else "",
    )
    assert expected in found
    assert bool(found) == bool(expected)
