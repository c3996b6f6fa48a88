"""Checks for test_train_loader.py: what worker processes do when they are read, left, signalled and killed.

It prints one JSON object of results, and then the pids of the processes that read for it while it waits to be
killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from train.data.loader import Loader
from train.data.sampler import GlobalBatchSampler, RankBatch
from train.errors import TrainError

SAMPLES = 23
RECEIVED_SIGNALS: list[int] = []


class ReaderPids(Dataset[tuple[int, int]]):
    """Each sample is (its index, the process that read it). Reading sample `bad` fails; `hang` takes
    forever."""

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


def batches(epoch: int, first_step: int = 0) -> list[RankBatch]:
    return list(GlobalBatchSampler(samples=SAMPLES, batch_size=4, seed=1).batches(epoch, first_step))


def have_exited(pids: set[int], seconds: float = 30.0) -> bool:
    """Return whether the processes exit within that time."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def read(loader: Loader, wanted: list[RankBatch]) -> tuple[bool, set[int]]:
    """Return whether every batch is the one of its one, and the processes that read them."""
    correct, readers = True, set()
    for (inputs, pids), one in loader(wanted):
        correct = correct and inputs.tolist() == one.indices
        readers |= set(pids.tolist())
    return correct, readers


def start_under_signals() -> tuple[Loader, dict[str, Any]]:
    """Read the first epoch while the whole session gets SIGTERM again and again."""
    signal.signal(signal.SIGTERM, lambda number, _frame: RECEIVED_SIGNALS.append(number))
    stop = threading.Event()

    def send_signals() -> None:
        while not stop.wait(0.02):
            os.killpg(0, signal.SIGTERM)

    thread = threading.Thread(target=send_signals)
    thread.start()
    loader = Loader(ReaderPids(), workers=2)
    correct, readers = read(loader, batches(0))
    stop.set()
    thread.join()
    return loader, {"correct": correct, "readers": len(readers), "signalled": bool(RECEIVED_SIGNALS)}


def read_many_epochs(loader: Loader) -> dict[str, Any]:
    """Later epochs: one started in the middle, one left early, one left by an exception, one never
    started."""
    first = read(loader, batches(1))
    from_the_middle = read(loader, batches(2, first_step=3))
    for _batch in loader(batches(3)):
        break
    after_break = read(loader, batches(4))
    try:
        for _batch in loader(batches(5)):
            raise ValueError("a bad loss")
    except ValueError:
        pass
    loader(batches(6))
    after_error = read(loader, batches(7))
    unfinished = loader(batches(8))
    next(unfinished)
    overtaking = read(loader, batches(9))
    left = len(list(unfinished))
    epochs = (first, from_the_middle, after_break, after_error, overtaking)
    readers = set().union(*(pids for _correct, pids in epochs))
    loader.close()
    loader.close()
    return {
        "correct": [correct for correct, _pids in epochs],
        "readers": len(readers),
        "left": left,
        "exited": have_exited(readers),
    }


def read_bad_sample() -> dict[str, Any]:
    loader = Loader(ReaderPids(bad=7), workers=2)
    message = ""
    try:
        read(loader, batches(0))
    except RuntimeError as error:
        message = str(error)
    others = [one for one in batches(0) if 7 not in one.indices]
    correct, _readers = read(loader, others)
    loader.close()
    return {"raised": "sample 7" in message, "correct afterwards": correct}


def lose_a_worker() -> dict[str, Any]:
    loader = Loader(ReaderPids(hang=batches(0)[2].indices[0]), workers=1)
    message = ""
    try:
        for (_inputs, pids), _ in loader(batches(0)):
            os.kill(pids[0].item(), signal.SIGKILL)
    except TrainError as error:
        message = str(error)
    loader.close()
    return {"message": message}


def close_during_hanging_read() -> dict[str, Any]:
    # How long torch waits for a worker to exit; it is 5 s.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    loader = Loader(ReaderPids(hang=batches(0)[1].indices[0]), workers=1)
    (_inputs, pids), _ = next(loader(batches(0)))
    loader.close()
    return {"exited": have_exited(set(pids.tolist()))}


def refuse_unpicklable_dataset() -> dict[str, Any]:
    class Local(ReaderPids):
        pass

    try:
        next(Loader(Local(), workers=1)(batches(0)))
    except TrainError as error:
        return {"message": str(error)}
    return {"message": ""}


def main() -> None:
    loader, started = start_under_signals()
    results: dict[str, Any] = {"start_under_signals": started, "read_many_epochs": read_many_epochs(loader)}
    checks: tuple[Callable[[], dict[str, Any]], ...] = (
        read_bad_sample,
        lose_a_worker,
        close_during_hanging_read,
        refuse_unpicklable_dataset,
    )
    for check in checks:
        results[check.__name__] = check()
    print(json.dumps(results), flush=True)
    wait()


def wait() -> None:
    loader = Loader(ReaderPids(), workers=2)
    _correct, readers = read(loader, batches(0))
    reading = loader(batches(1))
    next(reading)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in readers}
    print(json.dumps(sorted(readers | parents - {os.getpid()})), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main()
