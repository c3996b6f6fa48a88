"""The faults of `python -m bench faults`, in the order of the table."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from functools import partial

from bench.faults import injections as by
from bench.faults.injections import Inject, Prepare
from bench.faults.lab import Lab

DEATH = 3.0  # seconds from a death to the end of every rank, at most
SILENCE = 15.0 + 3.0  # the limit of the heartbeat, and 3 s
NOTICE = 5.0  # seconds between two looks at the instance metadata


class Then(enum.Enum):
    """What is expected of the job."""

    ENDS = "ends"
    GOES_ON = "goes on"
    RESTARTS = "restarts"
    NEVER_STARTS = "never starts"
    SUCCEEDS = "succeeds"  # although it is started into the fault


def _nothing(_: Lab) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """A fault. `script` is the argument of the script, `prepare` what happens before the job, `restore` what
    happens after it. `goal`: seconds to the end of every rank. `codes`: the exit codes that are right, any
    but 0 without."""

    name: str
    inject: Inject = by.nothing
    script: str = ""
    then: Then = Then.ENDS
    goal: float = DEATH
    codes: tuple[int, ...] = ()
    wide: bool = False  # also on 4 nodes x 1 rank
    prepare: Prepare = _nothing
    restore: Prepare = _nothing
    up: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    frozen: int | None = None  # a node whose ranks are stopped, not gone
    thaws: bool = False  # time counts from when that node continues
    destroys: bool = False  # the cluster is of no use afterwards


_Killed = partial(Fault, codes=(137,))
_Restarted = partial(Fault, then=Then.RESTARTS, launch=("--retries", "1"))
_Lost = partial(Fault, goal=SILENCE, destroys=True)
_Cut = partial(Fault, goal=SILENCE, wide=True, restore=by.heal)
_Refused = partial(Fault, then=Then.NEVER_STARTS, goal=30.0)
_Harmless = partial(Fault, then=Then.SUCCEEDS)

FAULTS = (
    _Killed("kill -9 of a rank", by.send("rank", 1)),
    _Killed("kill -9 of a rank; another one ignores SIGTERM", by.send("rank", 1), "ignores-sigterm"),
    _Restarted("kill -9 of a rank, `--retries 1`", by.send("rank", 1)),
    _Killed("kill -9 of torchrun on node 1", by.send("launcher", 1)),
    _Killed("kill -9 of torchrun on node 0, the rendezvous", by.send("launcher", 0)),
    _Restarted("kill -9 of torchrun, `--retries 1`", by.send("launcher", 1)),
    Fault("kill -9 of the supervisor", by.send("agent", 1), wide=True),
    Fault("kill -9 of the guard", by.send("agent", 1, index=0)),
    Fault("kill -9 of guard and supervisor", by.send("agent", 1, index=None)),
    Fault(
        "the supervisor is stopped (SIGSTOP)",
        by.send("agent", 1, number=signal.SIGSTOP),
        goal=SILENCE + DEATH + DEATH,
    ),
    Fault("kill -9 of all of cloudddp on a node", by.kill_cloudddp(1)),
    Fault("kill -9 of every process of a node", by.on_node(1, "sh", "-c", "kill -9 -1"), destroys=True),
    Fault(
        "kill -9 of sshd",
        by.on_node(1, "pkill", "-9", "^sshd"),
        then=Then.GOES_ON,
        codes=(0, 1),  # 1 is `logs -f` afterwards: it lacks the lines of the node that it cannot reach
        destroys=True,
    ),
    Fault("a rank raises an exception", script="error", codes=(1, 134)),
    Fault("a rank aborts after its last line", script="abort", codes=(134,)),
    Fault("a rank exits 0 early", script="early", goal=2 * DEATH),
    _Harmless("no barrier before the end", script="no-barrier"),
    _Killed(
        "the kernel ends a rank: out of memory", by.out_of_memory(1), "memory", restore=by.remove_oom_group
    ),
    Fault("disk full while a rank saves", by.sim("fill-disk", "1"), "disk", restore=by.heal),
    Fault(
        "the clock of a node jumps by an hour",
        by.clock_ahead(1),
        then=Then.GOES_ON,
        prepare=by.prepare_clock,
        restore=by.reset_clock,
    ),
    _Harmless("names of nodes do not resolve", prepare=by.without_names, destroys=True),
    _Harmless("a node's name is 127.0.1.1, as on Debian", prepare=by.loopback_names, destroys=True),
    Fault("GLOO_SOCKET_IFNAME=eth99 on all nodes", launch=("-e", "GLOO_SOCKET_IFNAME=eth99")),
    Fault("GLOO_SOCKET_IFNAME=eth99 on one node", script="wrong-interface-on-one"),
    Fault("GLOO_SOCKET_IFNAME=lo", launch=("-e", "GLOO_SOCKET_IFNAME=lo")),
    _Refused("no packets between nodes from the start", prepare=by.cut_before, restore=by.heal),
    _Refused("port 29500 alone is open", prepare=by.only_rendezvous_port, destroys=True),
    _Refused("a setup command fails", prepare=by.failing_setup, restore=by.no_setup),
    _Cut("cut between two nodes", by.sim("cut-between", "0", "1")),
    _Cut("cut one way", by.sim("cut-from", "0", "1")),
    _Cut("a node loses its network", by.sim("cut", "1")),
    _Lost("a node's interface goes down", by.on_node(1, "ip", "link", "set", "ens5", "down")),
    _Lost("a node is frozen", by.sim("freeze", "1"), wide=True, frozen=1),
    _Lost(
        "a frozen node continues after the verdict",
        by.sim("freeze", "1"),
        goal=DEATH,
        wide=True,
        frozen=1,
        thaws=True,
    ),
    _Lost("a node dies", by.sim("kill", "1"), wide=True),
    _Lost("spot notice", by.interrupt_spot, goal=DEATH + NOTICE, codes=(143,), up=("--spot",)),
    _Lost(
        "the deadline",
        goal=90.0,
        codes=(143,),
        prepare=by.deadline_in(75),
        launch=("--save-minutes", "1"),
    ),
    _Lost("`down` of another client", by.down_elsewhere, goal=30.0, codes=(1,)),
)
