"""Train a network: the page to read first.

Started by torchrun, by hand on each node, or as one process; see docs/training.md or --help. It must not know how
ranks, snapshots or datasets work: it puts them together. torch is imported after the flags are checked, so that a
wrong flag costs no waiting.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if not __package__:
    # Run as a file: `train` must be importable, and this folder's own modules must not be top-level names.
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]

from train import preempt
from train.config import Config, parse
from train.errors import Preempted, TrainError, UsageError
from train.failures import explain

if TYPE_CHECKING:
    from train.dist import Ranks

KEPT: list[object] = []  # what only the end of the process may free: see `leave`


def main(argv: list[str] | None = None) -> int:
    """Run the training that the command line asks for. Returns the exit code: 0; 1 failed;
    2 bad usage or data; 143 told to stop."""
    begun = time.perf_counter()
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        if config.spawn and "TORCHELASTIC_RUN_ID" in os.environ:
            # Each rank of torchrun would start a job of its own, all in one folder.
            raise UsageError("--spawn is for starts without torchrun: leave one of them out")
    except TrainError as error:
        # The flags are the same on every rank: one of them says what is wrong.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train: {error}\n", end="", file=sys.stderr)
        return error.exit_code

    if config.spawn:
        from train.spawn import spawn

        return spawn(config, begun)
    return run(config, begun)


def run(config: Config, begun: float) -> int:
    """Be one rank of the job. Returns the exit code."""
    return explained(config, partial(join_and_train, config, begun))


def explained(config: Config, work: Callable[[], object]) -> int:
    """Run `work`, and print why it failed if it did. Returns the exit code of the rank."""
    # torchrun shows the exception that this leaves in its error file as the cause of a failed job.
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(work)()
    except (Exception, KeyboardInterrupt) as error:
        KEPT.append(error)  # its traceback holds the model
        ending = explain(error, config)
        if ending is None:
            sys.excepthook(*sys.exc_info())
            return 1
        rank = str(config.place[0]) if config.place else os.environ.get("RANK", "0")
        if rank == "0" or not ending.alike:
            print(f"train: rank {rank}: {ending.text}\n", end="", file=sys.stderr, flush=True)
        return ending.code
    return 0


def join_and_train(config: Config, begun: float) -> None:
    """Join the other ranks and train with them."""
    from train import dist

    place = dist.find_place(config, os.environ)
    on_lost = partial(give_up, config, dist.raise_lost)
    # Listened for once all are there: before that nothing can be lost, and a process that waits for the others in
    # C++ would not see the wish.
    with dist.join(config, place, on_lost=on_lost) as ranks, preempt.listen() as stop:
        if ranks.world > 1:  # the one line that every rank prints: all are there, each on its device
            print(f"rank {ranks.rank} of {ranks.world} joined, on {ranks.device}\n", end="", flush=True)
        train(config, ranks, stop, begun)


def train(config: Config, ranks: Ranks, stop: preempt.StopSignal, begun: float) -> None:
    """Load the data, build the model, train it, and say how well it does."""
    from train import data, dist, models, parallel
    from train.metrics import Metrics, make_folder
    from train.trainer import Trainer

    def prepare() -> data.Data:
        loaded = data.load(config, download=config.download and ranks.place.local_rank == 0)
        make_folder(config.folder)
        return loaded

    dist.choose_arithmetic(config)
    if ranks.device.type == "cpu":
        dist.keep_freed_memory()
    loaded = ranks.in_turn(prepare, what="load the data")
    if config.on_device:
        loaded = data.on_device(loaded, ranks.device)
    module = models.build(config.model, shape=loaded.shape, classes=loaded.classes, seed=config.seed)
    spread = parallel.build(config, ranks, module, shape=loaded.shape)
    KEPT.append(spread)
    metrics = Metrics(config.folder, enabled=ranks.is_main, tensorboard=config.tensorboard)
    ranks.together(metrics.lock, what="use the folder of --out")
    trainer = Trainer(config=config, ranks=ranks, parallel=spread, data=loaded, metrics=metrics, stop=stop)
    trainer.resume()
    metrics.open(trainer.step, epochs=trainer.validated)
    metrics.status("running", **trainer.standing())

    def lost(error: RuntimeError) -> None:
        try:
            trainer.raise_lost(error)
        except TrainError as problem:
            with suppress(OSError):
                metrics.status("failed", **trainer.standing(), error=str(problem))
            raise

    try:
        with ranks.watch.reporting(partial(give_up, config, lost)):
            trainer.fit()
    except Preempted:
        metrics.status("preempted", **trainer.standing())
        raise
    except BaseException as error:
        with suppress(OSError):  # the disk may be what failed
            metrics.status("failed", **trainer.standing(), error=str(error) or type(error).__name__)
        raise
    finally:
        trainer.close()
        metrics.close()
    metrics.status("finished", **trainer.standing(), **trainer.result())
    metrics.say(f"{trainer.summary()} after {trainer.epoch} epochs, {time.perf_counter() - begun:.1f} s")


def give_up(config: Config, explain_loss: Callable[[RuntimeError], object], error: RuntimeError) -> NoReturn:
    """End the process because another rank has died, from a thread beside the main one: that one waits in C++, and
    no exception reaches it. `explain_loss` raises what the main thread would have."""
    leave(explained(config, partial(explain_loss, error)))


def leave(code: int) -> NoReturn:
    """End the process with `code`, without Python's shutdown.

    DistributedDataParallel keeps gloo's threads alive beyond destroy_process_group, and one of them may still want the
    interpreter's lock. Python's shutdown then aborts a finished rank with SIGABRT (torch 2.15); and where the model is
    freed, it waits for that thread with the lock in its hand, for ever (torch 2.11).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    preempt.end_quietly()
    leave(main())
