"""Saves ever newer snapshots until it is killed, or until the disk is full.

`write_snapshots.py FOLDER LIMIT ELEMENTS`: no file may grow beyond LIMIT bytes, unless it is 0.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from train.checkpoint import full
from train.errors import TrainError

folder, limit, elements = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for step in range(1, 10_000):
    try:
        full.save(folder, {"step": step, "payload": torch.full((elements,), float(step))})
    except TrainError as error:
        sys.exit(str(error))
