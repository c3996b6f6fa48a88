"""The faults of `python -m bench faults`, in the order of the table."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
    """A fault. `script` is the argument of the script, `prepare` what happens before the job, `restore` what happens after
    it. `goal`: seconds to the end of every rank. `codes`: the exit codes that are right, any but 0 without."""

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


FAULTS = (
    Fault("kill -9 of a rank", by.kill("rank", 1), codes=(137,)),
    Fault("kill -9 of a rank; another one ignores SIGTERM", by.kill("rank", 1), "ignores-sigterm", codes=(137,)),
    Fault("kill -9 of a rank, `--retries 1`", by.kill("rank", 1), then=Then.RESTARTS, launch=("--retries", "1")),
    Fault("kill -9 of torchrun on node 1", by.kill("launcher", 1), codes=(137,)),
    Fault("kill -9 of torchrun on node 0, the rendezvous", by.kill("launcher", 0), codes=(137,)),
    Fault(
        "kill -9 of torchrun, `--retries 1`", by.kill("launcher", 1), then=Then.RESTARTS, launch=("--retries", "1")
    ),
    Fault("kill -9 of the supervisor", by.kill("agent", 1), wide=True),
    Fault("kill -9 of the guard", by.kill("agent", 1, index=0)),
    Fault("kill -9 of guard and supervisor", by.kill("agent", 1, index=None)),
    Fault("the supervisor is stopped (SIGSTOP)", by.stop_supervisor(1), goal=SILENCE + DEATH + DEATH),
    Fault("kill -9 of all of cloudddp on a node", by.kill_cloudddp(1)),
    Fault("kill -9 of every process of a node", by.kill_everything(1), destroys=True),
    # 1 is `logs -f` afterwards: it lacks the lines of the node that it cannot reach.
    Fault("kill -9 of sshd", by.kill_sshd(1), then=Then.GOES_ON, codes=(0, 1), destroys=True),
    Fault("a rank raises an exception", script="error", codes=(1, 134)),
    Fault("a rank aborts after its last line", script="abort", codes=(134,)),
    Fault("a rank exits 0 early", script="early", goal=2 * DEATH),
    Fault("no barrier before the end", script="no-barrier", then=Then.SUCCEEDS),
    Fault("the kernel ends a rank: out of memory", by.out_of_memory(1), "memory", restore=by.remove_oom_group,
          codes=(137,)),
    Fault("disk full while a rank saves", by.sim("fault", "fill-disk", "1"), "disk", restore=by.heal),
    Fault("the clock of a node jumps by an hour", by.clock_ahead(1), then=Then.GOES_ON, prepare=by.prepare_clock,
          restore=by.reset_clock),
    Fault("names of nodes do not resolve", then=Then.SUCCEEDS, prepare=by.without_names, destroys=True),
    Fault("a node's name is 127.0.1.1, as on Debian", then=Then.SUCCEEDS, prepare=by.loopback_names, destroys=True),
    Fault("GLOO_SOCKET_IFNAME=eth99 on all nodes", launch=("-e", "GLOO_SOCKET_IFNAME=eth99")),
    Fault("GLOO_SOCKET_IFNAME=eth99 on one node", script="wrong-interface-on-one"),
    Fault("GLOO_SOCKET_IFNAME=lo", launch=("-e", "GLOO_SOCKET_IFNAME=lo")),
    Fault("no packets between nodes from the start", then=Then.NEVER_STARTS, prepare=by.cut_before, restore=by.heal,
          goal=30.0),
    Fault("port 29500 alone is open", then=Then.NEVER_STARTS, prepare=by.only_rendezvous_port, destroys=True,
          goal=30.0),
    Fault("a setup command fails", then=Then.NEVER_STARTS, prepare=by.failing_setup, restore=by.no_setup, goal=30.0),
    Fault("cut between two nodes", by.sim("fault", "cut-between", "0", "1"), goal=SILENCE, wide=True, restore=by.heal),
    Fault("cut one way", by.sim("fault", "cut-from", "0", "1"), goal=SILENCE, wide=True, restore=by.heal),
    Fault("a node loses its network", by.sim("fault", "cut", "1"), goal=SILENCE, wide=True, restore=by.heal),
    Fault("a node's interface goes down", by.interface_down(1), goal=SILENCE, destroys=True),
    Fault("a node is frozen", by.sim("fault", "freeze", "1"), goal=SILENCE, wide=True, frozen=1, destroys=True),
    Fault("a frozen node continues after the verdict", by.sim("fault", "freeze", "1"), wide=True, frozen=1, thaws=True,
          destroys=True),
    Fault("a node dies", by.sim("fault", "kill", "1"), goal=SILENCE, wide=True, destroys=True),
    Fault("spot notice", by.interrupt_spot, goal=DEATH + NOTICE, codes=(143,), up=("--spot",), destroys=True),
    Fault("the deadline", goal=90.0, codes=(143,), prepare=by.deadline_in(75), destroys=True,
          launch=("--save-minutes", "1")),
    Fault("`down` of another client", by.down_elsewhere, goal=30.0, codes=(1,), destroys=True),
)  # fmt: skip
