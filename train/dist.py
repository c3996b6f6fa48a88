"""This process's place among the ranks, and the few collective operations that training needs.

It must not know models, data or snapshots. Everything works alike with one process and no process group: then a
sum is the value itself. Rank and local rank are read, never computed, since nodes may hold different numbers of
ranks.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import Config
from train.errors import TrainError, UsageError
from train.peers import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of the job this is. `grouped` is False for a single process started by hand; `restarts` is
    how often torchrun has restarted the job's ranks."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    grouped: bool = False
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A place with its device, once the process group stands."""

    place: Place
    device: torch.device
    watch: Watch = field(default_factory=Watch)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that prints and writes metrics."""
        return self.place.rank == 0

    def seed(self, number: int) -> None:
        """Seed the random numbers that layers draw on this rank's device."""
        # Not torch.manual_seed, which walks through every kind of device: half a millisecond where CUDA is built in
        # but not used.
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(number)  # --parallel pipeline computes on a second one, too

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, as a new tensor, the same on every rank."""
        total = values.clone()
        if self.place.grouped:
            dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on at least one rank."""
        return bool(self.sum(torch.tensor(int(flag), device=self.device)).item())

    def any_soon(self, flag: bool) -> Callable[[], bool]:
        """Begin to ask whether `flag` is set on at least one rank; the answer comes from what is returned.

        The question travels while the rank computes. Every rank must ask at the same place.
        """
        if not self.place.grouped:
            return lambda: flag
        total = torch.tensor(int(flag), device=self.device)
        work = dist.all_reduce(total, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(total.item())

        return answer

    def gather(self, number: int) -> list[int]:
        """The number of every rank, in rank order."""
        numbers = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        return self.sum(numbers).tolist()

    def share(self, blob: bytes | None, *, source: int) -> bytes:
        """The bytes that rank `source` holds, on every rank. The other ranks pass None."""
        if not self.place.grouped:
            return blob or b""
        length = torch.tensor(len(blob or b""), device=self.device)
        dist.broadcast(length, src=source)
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            payload.copy_(torch.frombuffer(bytearray(blob or b""), dtype=torch.uint8))
        dist.broadcast(payload, src=source)
        return payload.cpu().numpy().tobytes()

    def align_buffers(self, module: nn.Module) -> None:
        """Give every rank the buffers of rank 0. DDP does so at the start of a forward pass only, so after a
        training step the running statistics of BatchNorm differ between the ranks."""
        if not self.place.grouped:
            return
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)

    def in_turn(self, work: Callable[[], T], *, what: str) -> T:
        """What `work` returns, done by local rank 0 of each node before the others of that node.

        Raises on every rank if it raises on one, so that none waits for a rank that has gone.
        """
        result: T | None = None
        error: Exception | None = None
        for first in (True, False):
            if (self.place.local_rank == 0) is first:
                try:
                    with self.watch.undisturbed():
                        result = work()
                except Exception as problem:
                    error = problem
            if self.any(error is not None):
                raise error or UsageError(f"stopped, because another rank could not {what}")
        return result

    def together(self, work: Callable[[], object], *, what: str) -> None:
        """Do `work`, which is nothing on most ranks. Raises `TrainError` on every rank if it raises one on any, so
        that none waits for a rank that has gone, or goes on alone."""
        problem: TrainError | None = None
        try:
            with self.watch.undisturbed():
                work()
        except TrainError as error:
            problem = error
        if self.any(problem is not None):
            raise problem or TrainError(f"stopped, because another rank could not {what}")


def find_place(config: Config, environ: Mapping[str, str]) -> Place:
    """This process's place, from `RANK LOCAL_RANK` on the command line, else from torchrun's variables, else a
    single process. Raises `UsageError` where only half of it is known."""
    if not config.place and "RANK" not in environ:
        if config.init_method != "env://" or config.world_size:
            raise UsageError(
                "which rank is this? End the command with RANK LOCAL_RANK, or set RANK and LOCAL_RANK"
            )
        return Place()
    rank, local_rank = config.place or (_number(environ, "RANK"), _number(environ, "LOCAL_RANK", default=0))
    world = config.world_size or _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is not in 0..{world - 1}: check RANK and WORLD_SIZE (or --world-size)")
    if config.init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise UsageError(f"{' and '.join(missing)} must be set, or give --init-method tcp://HOST:PORT")
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
    return Place(rank=rank, local_rank=local_rank, world=world, grouped=True, restarts=restarts)


def pick_device(config: Config, place: Place) -> torch.device:
    """The device of this rank; of --parallel pipeline the first of its two, the other being the next one.

    Raises `UsageError` where the node has fewer GPUs than its ranks need.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("--device cuda: torch sees no GPU here; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    each = 2 if config.parallel == "pipeline" else 1
    # A launcher may show each rank its own GPUs only; then they begin at 0 whatever the local rank.
    if count == each and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)
    # By the local rank and not the rank: on the second node these differ.
    index = each * place.local_rank
    if index + each <= count:
        return torch.device("cuda", index)
    if each == 1:
        raise UsageError(
            f"local rank {place.local_rank} has no GPU: {count} here; start at most {count} ranks per node"
        )
    raise UsageError(
        f"--parallel pipeline takes two GPUs for each process: local rank {place.local_rank} needs "
        f"{index + each} on this node, which has {count}; start with --nproc-per-node = GPUs / 2"
        + (f", here {count // each}" if count >= each else ", or give --device cpu")
    )


def choose_arithmetic(config: Config) -> None:
    """Trade exactness for speed, or speed for the same bits each time, as `config` says."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = not config.deterministic
    if not config.deterministic:
        return
    # cuBLAS is deterministic only with a fixed workspace, chosen before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors, on the CPU of Linux.

    By default glibc gives it back to the system and fetches it again at the next allocation, page by page: up to a
    quarter of the time of a step of the MNIST network (200,000 page faults in 60 steps of 64 images).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**25)  # the largest that glibc accepts


@contextmanager
def join(
    config: Config, place: Place, *, on_lost: Callable[[RuntimeError], object] | None = None
) -> Iterator[Ranks]:
    """The process group, for the length of a `with` block, with a barrier before a clean end.

    `on_lost` ends the process if another rank has died and gloo leaves this one waiting: see peers.py.
    """
    device = pick_device(config, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(place=place, device=device)
    if not place.grouped and config.parallel in ("ddp", "pipeline"):
        yield ranks
        return
    backend = config.backend if config.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        raise UsageError("--backend nccl needs GPUs: give --backend gloo or leave it to auto")
    timeout = timedelta(seconds=config.timeout)
    try:
        dist.init_process_group(
            backend,
            rank=place.rank,
            world_size=place.world,
            timeout=timeout,
            # Bound to one device NCCL refuses tensors on the other of a pipeline's two; stages per rank talk to their
            # neighbours over connections of their own only where none was made for all of them ahead.
            device_id=device if backend == "nccl" and config.parallel in ("ddp", "fsdp") else None,
            **_meeting(config, place, timeout),
        )
    except ValueError as error:
        raise UsageError(
            f"the ranks cannot meet there ({error}): check --init-method, MASTER_ADDR and MASTER_PORT"
        ) from error
    except RuntimeError as error:
        advice = "were all of them started, with the same address, and can they reach it?"
        if "EADDRINUSE" in str(error):
            advice = "does an earlier run still hold the port? End it, or give all of them another one"
        raise TrainError(f"the {place.world} ranks could not meet ({_gist(error)}); {advice}") from error
    clean = False
    try:
        if backend == "gloo" and on_lost is not None and place.world > 1:
            ranks.watch.on_lost = on_lost
            ranks.watch.start(rank=place.rank, world=place.world)
        yield ranks
        # Without it a rank that is done early tears down connections which slower ranks still read from: they
        # died of it in 3 of 7 finished trainings over two nodes.
        dist.barrier()
        ranks.watch.farewell()
        clean = True
    except RuntimeError as error:
        raise_lost(error)
    finally:
        ranks.watch.stop()
        # After a failure NCCL would wait here for operations that the other ranks never join; the process is about
        # to end and takes its connections along.
        if clean or backend == "gloo":
            dist.destroy_process_group()


def _meeting(config: Config, place: Place, timeout: timedelta) -> dict[str, Any]:
    """Where the ranks find each other, as init_process_group takes it."""
    if not place.grouped:
        # A single process that was started by hand is a group of one for the modes that cannot do without.
        return {"store": dist.HashStore()}
    scheme, _, path = config.init_method.partition("://")
    if scheme == "file" and not Path(path).parent.is_dir():
        # Each rank would try to make the file for minutes, whatever the timeout.
        raise UsageError(f"--init-method {config.init_method}: there is no such folder to make the file in")
    if not place.restarts or os.environ.get("GROUP_WORLD_SIZE") != "1" or config.init_method != "env://":
        return {"init_method": config.init_method}
    # torchrun serves one store to all its restarts (pytorch#135712): a rank that looks too early would find the
    # addresses of ranks that have gone, and hang or fail (2 of 3 restarts, torch 2.15). So each restart has names of
    # its own. Only within one node: agents of several nodes do not count alike, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # has to be set for them.
    store, _, _ = next(dist.rendezvous(config.init_method, place.rank, place.world, timeout=timeout))
    return {"store": dist.PrefixStore(f"restart{place.restarts}", store)}


def lost(error: RuntimeError) -> str | None:
    """What `error` says, where it tells that another rank has gone or hangs, else None.

    gloo's errors have no type of their own; the path of its source is in them.
    """
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    return f"the connection to the other ranks is lost ({_gist(error)})"


def raise_lost(error: RuntimeError) -> NoReturn:
    """Raises `TrainError` if `error` means that another rank has died, else `error`."""
    problem = lost(error)
    if problem is None:
        raise error
    raise TrainError(problem) from error


def _gist(error: RuntimeError) -> str:
    """The first line without the place in the library's source and its guesses at the cause."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". This ")[0].rstrip(".")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: must be set to a number from 0 up")
    return int(text)
