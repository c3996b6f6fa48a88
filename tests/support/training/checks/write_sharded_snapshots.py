"""Saves ever newer sharded snapshots from each rank until it is killed: `write_sharded_snapshots.py
FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from train.checkpoint import sharded
from train.config import make
from train.distributed.process_group import join
from train.distributed.rank_info import find_rank

config = make(dataset="synthetic", timeout=60.0)
with join(config, find_rank(config, os.environ)) as comm:
    for step in range(1, 10_000):
        model = {name: torch.full((1_000_000,), float(step)) for name in ("one", "other")}
        sharded.save(Path(sys.argv[1]), {"step": step}, (model, {}, {}), comm)
