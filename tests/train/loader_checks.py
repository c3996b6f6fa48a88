"""Runs in a process of its own: what worker processes do when they are read, left, signalled and killed.

`loader_checks.py` prints one JSON object of what it saw; `loader_checks.py wait` prints its workers and waits to
be killed. It must not know what is right.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.data import Tensors
from train.errors import TrainError
from train.loader import Loader
from train.sampler import GlobalBatches, Shard

SAMPLES = 23
SEEN_SIGNALS: list[int] = []


class Readers(Dataset[tuple[int, int]]):
    """Each sample is (its index, the process that read it). Sample `bad` cannot be read; `hang` takes for ever."""

    def __init__(self, *, bad: int = -1, hang: int = -1) -> None:
        self.bad = bad
        self.hang = hang

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.bad:
            raise RuntimeError(f"sample {index}")
        while index == self.hang:
            time.sleep(60)
        return index, os.getpid()


def plan(epoch: int, first: int = 0) -> list[Shard]:
    return list(GlobalBatches(samples=SAMPLES, batch_size=4, seed=1).epoch(epoch, first))


def gone(pids: set[int], seconds: float = 30.0) -> bool:
    """Whether the processes end within that time."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def read(loader: Loader, shards: list[Shard]) -> tuple[bool, set[int]]:
    """Whether every batch is its shard's, and who read them."""
    right, readers = True, set()
    for inputs, pids, shard in loader(shards):
        right = right and inputs.tolist() == shard.indices
        readers |= set(pids.tolist())
    return right, readers


def start_under_signals() -> tuple[Loader, dict[str, Any]]:
    """The first batch, while the whole session is told to end again and again."""
    signal.signal(signal.SIGTERM, lambda number, _frame: SEEN_SIGNALS.append(number))
    stop = threading.Event()

    def pester() -> None:
        while not stop.wait(0.02):
            os.killpg(0, signal.SIGTERM)

    thread = threading.Thread(target=pester)
    thread.start()
    loader = Loader(Readers(), workers=2)
    right, readers = read(loader, plan(0))
    stop.set()
    thread.join()
    return loader, {"right": right, "readers": len(readers), "signals_seen": bool(SEEN_SIGNALS)}


def live_on(loader: Loader) -> dict[str, Any]:
    """Later epochs, one entered in the middle, one left early, one left by an exception, one never begun."""
    first = read(loader, plan(1))
    middle = read(loader, plan(2, first=3))
    for _batch in loader(plan(3)):
        break
    after_break = read(loader, plan(4))
    try:
        for _batch in loader(plan(5)):
            raise ValueError("a bad loss")
    except ValueError:
        pass
    loader(plan(6))
    after_error = read(loader, plan(7))
    begun = loader(plan(8))
    next(begun)
    overtaking = read(loader, plan(9))
    leftover = len(list(begun))
    epochs = (first, middle, after_break, after_error, overtaking)
    readers = set().union(*(pids for _right, pids in epochs))
    loader.close()
    loader.close()
    return {
        "right": [right for right, _pids in epochs],
        "readers": len(readers),
        "leftover": leftover,
        "gone": gone(readers),
    }


def close_in_the_middle() -> dict[str, Any]:
    loader = Loader(Readers(), workers=2)
    reading = loader(plan(0))
    _inputs, pids, _shard = next(reading)
    loader.close()
    return {"gone": gone(set(pids.tolist()))}


def meet_a_bad_sample() -> dict[str, Any]:
    loader = Loader(Readers(bad=7), workers=2)
    seen = ""
    try:
        read(loader, plan(0))
    except RuntimeError as error:
        seen = str(error)
    rest = [shard for shard in plan(0) if 7 not in shard.indices]
    right, _readers = read(loader, rest)
    loader.close()
    return {"seen": "sample 7" in seen, "right_afterwards": right}


def lose_a_worker() -> dict[str, Any]:
    loader = Loader(Readers(hang=plan(0)[2].indices[0]), workers=1)
    seen = ""
    try:
        for _inputs, pids, _shard in loader(plan(0)):
            os.kill(pids[0].item(), signal.SIGKILL)
    except TrainError as error:
        seen = str(error)
    loader.close()
    return {"seen": seen}


def close_on_a_read_that_hangs() -> dict[str, Any]:
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = (
        0.2  # how long torch waits for a worker to end; it is 5 s
    )
    loader = Loader(Readers(hang=plan(0)[1].indices[0]), workers=1)
    _inputs, pids, _shard = next(loader(plan(0)))
    loader.close()
    return {"gone": gone(set(pids.tolist()))}


def share_memory() -> dict[str, Any]:
    """Workers read the tensors of this process and not copies: a later change here reaches them."""
    tensors = Tensors(torch.zeros(SAMPLES, 2), torch.arange(SAMPLES))
    loader = Loader(tensors, workers=1)
    before = sum(inputs.sum().item() for inputs, _labels, _shard in loader(plan(0)))
    tensors.inputs.fill_(1.0)
    after = sum(inputs.sum().item() for inputs, _labels, _shard in loader(plan(1)))
    loader.close()
    return {"sums": [before, after]}


def refuse_what_cannot_be_sent() -> dict[str, Any]:
    class Local(Readers):
        pass

    try:
        next(Loader(Local(), workers=1)(plan(0)))
    except TrainError as error:
        return {"seen": str(error)}
    return {"seen": ""}


def main() -> None:
    loader, started = start_under_signals()
    seen: dict[str, Any] = {"start_under_signals": started, "live_on": live_on(loader)}
    checks: tuple[Callable[[], dict[str, Any]], ...] = (
        close_in_the_middle,
        meet_a_bad_sample,
        lose_a_worker,
        close_on_a_read_that_hangs,
        share_memory,
        refuse_what_cannot_be_sent,
    )
    for check in checks:
        begun = time.monotonic()
        seen[check.__name__] = check()
        print(check.__name__, round(time.monotonic() - begun, 2), file=sys.stderr)
    print(json.dumps(seen), flush=True)


def wait() -> None:
    loader = Loader(Readers(), workers=2)
    _right, readers = read(loader, plan(0))
    reading = loader(plan(1))
    next(reading)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in readers}
    print(json.dumps(sorted(readers | parents - {os.getpid()})), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    wait() if sys.argv[1:] == ["wait"] else main()
