"""The page about Lightning, transformers and accelerate, as it stands, with these libraries: 2 process nodes,
one rank each, on gloo."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.harness import ROOT, CommandLine
from support.pages import script
from support.witnesslab import witness

PAGE = ROOT / "docs/how-to/trainers.md"


@pytest.mark.timeout(2700)  # six jobs that import large packages
def test_page_about_trainers(cli: CommandLine) -> None:
    """Ranks train together, and a second job continues on both nodes."""
    (packages,) = Path(witness("trainers", "python")).parents[1].glob("lib/python*/site-packages")
    cli.write("cloudddp.toml", f'[job]\nenv = {{ PYTHONPATH = "{packages}", HF_HUB_OFFLINE = "1" }}\n')
    command = ["bash", "-c", script(PAGE.read_text())]
    done = subprocess.run(command, cwd=cli.cwd, env=cli.env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seen = (
        "2 ranks",
        "2 ranks, from None",
        "2 ranks, from checkpoints/trainer/checkpoint-4",
        "continues",
        "Restored all states from the checkpoint",
    )
    # 2 ranks print it, in 2 jobs of 3 scripts, or in one job; Lightning prints on rank 0.
    assert [done.stdout.count(one) for one in seen] == [12, 2, 2, 2, 1], done.stdout
