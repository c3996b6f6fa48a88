"""The trainer on a rank whose files may not grow beyond FILE_LIMIT bytes, as on a full disk: rank 0 only, so that a
test sees what the others make of it."""

from __future__ import annotations

import os
import resource

from train.main import main as train


def main(argv: list[str]) -> int:
    if os.environ.get("RANK", "0") == "0":
        limit = int(os.environ.get("FILE_LIMIT", "100000"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return train(argv)
