"""Which rank this process is. Rank and local rank are read and never computed, because nodes may hold
different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train.config import Config
from train.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The position of a process in the job.

    `local_world_size` is the number of ranks on this node, where torchrun says it, else that of all ranks.
    `distributed` is False for a single process started by hand. `restarts` is how often torchrun has
    restarted the ranks of the job.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    distributed: bool = False
    restarts: int = 0


def find_rank(config: Config, environ: Mapping[str, str]) -> RankInfo:
    """Return the position given by RANK LOCAL_RANK on the command line, else by torchrun's variables, else
    that of a single process. Raises `UsageError` where only part of it is given."""
    if not config.position and "RANK" not in environ:
        if config.rendezvous.init_method != "env://" or config.rendezvous.world_size:
            raise UsageError(
                "the rank of this process is unknown: end the command with RANK LOCAL_RANK, or set RANK and "
                "LOCAL_RANK"
            )
        return RankInfo()
    rank, local_rank = config.position or (
        _number(environ, "RANK"),
        _number(environ, "LOCAL_RANK", default=0),
    )
    world_size = config.rendezvous.world_size or _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} is not in 0..{world_size - 1}: check RANK and WORLD_SIZE (or --world-size)"
        )
    if config.rendezvous.init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise UsageError(f"set {' and '.join(missing)}, or give --init-method tcp://HOST:PORT")
    # By torchrun, and of the whole job by cloudddp, which starts torchrun anew.
    restarts = sum(
        _number(environ, name, default=0) for name in ("TORCHELASTIC_RESTART_COUNT", "CLOUDDDP_ATTEMPT")
    )
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=world_size),
        distributed=True,
        restarts=restarts,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: must be set to a number, at least 0")
    return int(text)
