"""torchrun whose ranks are forked from the agent instead of started with new interpreters.

`forked_torchrun.py ARGS...` takes the arguments of torchrun. Agent, rendezvous, restarts and signals are
torchrun's.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.training.launch import MAIN
from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train.main


def launch_forked(config: LaunchConfig, entrypoint: object) -> Callable[..., Any]:
    return elastic_launch(config=dataclasses.replace(config, start_method="fork"), entrypoint=run_rank)


def run_rank(*words: str) -> None:
    """Run what torchrun would pass to `python`: `-u -m MODULE ARGS...` or `-u SCRIPT ARGS...`."""
    target, argv = words[1], list(words[2:])
    if target == "-m":
        target, argv = argv[0], argv[1:]
    if target in (str(MAIN), "train.main"):
        # As a program it would end the process before the agent has its return value.
        code = train.main.main(argv)
        if code:
            sys.exit(code)
        return
    sys.argv[:] = [target, *argv]
    sys.path[0] = str(Path(target).parent)
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    run.elastic_launch = launch_forked
    run.main(sys.argv[1:])
