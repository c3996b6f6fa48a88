"""Ties moto's instances to nodes: states that take time and mean something.

An instance is `pending` until its node is up, `shutting-down` until everything the node ran has ended, and is
ended when its node powers off (at the deadline its user data set, for one). Knows moto's Instance and a node
backend; what a node is made of is the backend's business alone: two kinds stand behind the same server.
"""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.aws import LOCK
from cloudddp.sim.ec2 import spot
from cloudddp.sim.guest import log
from cloudddp.sim.nodespec import Nodes, spec_of

VISIBLE_SECONDS = 3600.0  # about as long as EC2 shows a terminated instance
_END_SECONDS = 45.0  # longer than processes.end may take
_INTERRUPTED = "Server.SpotInstanceTermination: Instance terminated due to spot interruption"
_POWERED_OFF = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
_TICK = 0.2  # seconds between looks at the deadlines
_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "stopping": 64, "stopped": 80}


@dataclass(frozen=True, slots=True)
class Timing:
    """How long, in seconds, EC2 takes at least: to run an instance, to let it answer SSH after that, to end it, to
    know of it everywhere (InvalidInstanceID.NotFound before), and to forget a terminated one.
    """

    pending: float = 0.0
    booting: float = 0.0
    shutting_down: float = 0.0
    unknown: float = 0.0
    visible: float = VISIBLE_SECONDS


@dataclass(slots=True)
class _Life:
    """One instance's turn-taking: `turn` is held while its node changes, `hurry` cuts a boot's waiting short."""

    instance: Any
    turn: threading.Lock = field(default_factory=threading.Lock)
    hurry: threading.Event = field(default_factory=threading.Event)
    deadline: datetime | None = None
    why: str = ""  # it ends, in EC2's words: "code: message"; '' where somebody asked for it
    born: float = field(default_factory=time.monotonic)
    ended: float | None = None


class Lifecycle:
    """The instances of all regions and their nodes. `install` once, before the first request."""

    def __init__(self, nodes: Nodes, timing: Timing) -> None:
        self._nodes = nodes
        self._timing = timing
        self.changed: Callable[[], None] = lambda: None  # called when a node has come up or gone
        self._lives: dict[str, _Life] = {}
        self._terminate: Callable[[Any], Any] = lambda _instance: None
        self._stop: Callable[[Any], Any] = lambda _instance: None

    def install(self) -> None:
        """Hook moto's Instance, and start the thread that watches the deadlines."""
        from moto.ec2.models import EC2Backend
        from moto.ec2.models.instances import Instance

        self._terminate, self._stop = Instance.terminate, Instance.stop
        launch, create = EC2Backend.run_instances, Instance.__init__

        @functools.wraps(create)
        def born(instance: Any, *args: Any, **kwargs: Any) -> None:
            create(instance, *args, **kwargs)
            _set(instance, "pending")

        @functools.wraps(launch)
        def run_instances(backend: Any, *args: Any, **kwargs: Any) -> Any:
            with LOCK:
                reservation = launch(backend, *args, **kwargs)
                for instance in reservation.instances:
                    self._lives[instance.id] = _Life(instance)
            for instance in reservation.instances:
                self._in_background(self._boot, instance.id)
            return reservation

        hooks: dict[str, Callable[[Any], Any]] = {
            "__init__": born,
            "terminate": self._on_terminate,
            "stop": self._on_stop,
            "start": self._on_start,
            "reboot": self._on_reboot,
        }
        for name, hook in hooks.items():
            # A bound method would not bind the instance; a plain function does.
            setattr(Instance, name, _plain(hook))
        known = EC2Backend.all_reservations

        @functools.wraps(known)
        def all_reservations(backend: Any, *args: Any, **kwargs: Any) -> Any:
            return [kept for one in known(backend, *args, **kwargs) if (kept := self._shown(one))]

        for name, changed in (("run_instances", run_instances), ("all_reservations", all_reservations)):
            setattr(EC2Backend, name, changed)
        self._nodes.on_end = self._on_end
        if not self._nodes.keeps_time:
            threading.Thread(target=self._watch, name="deadlines", daemon=True).start()

    def live(self) -> list[Any]:
        """moto's instances that have, or will have, a node on the network."""
        return [
            life.instance
            for life in list(self._lives.values())
            if life.instance.state in ("pending", "running", "stopping", "shutting-down")
        ]

    def at(self, private_ip: str) -> Any | None:
        """moto's instance that has this address now, or None."""
        return next((instance for instance in self.live() if instance.private_ip == private_ip), None)

    def instance(self, instance_id: str) -> Any:
        """moto's instance. Raises KeyError."""
        return self._lives[instance_id].instance

    def _shown(self, reservation: Any) -> Any:
        """The reservation as EC2 shows it now: it learns of new instances late, and forgets old ones."""
        now = time.monotonic()
        kept = []
        for instance in reservation.instances:
            life = self._lives.get(instance.id)
            fresh = life is not None and now - life.born < self._timing.unknown
            gone = life is not None and life.ended is not None and now - life.ended > self._timing.visible
            if not fresh and not gone:
                kept.append(instance)
        reservation.instances = kept
        return reservation if kept else None

    def describe(self) -> list[dict[str, Any]]:
        """One record per instance that is not terminated; see control.nodes."""
        lives = [life for life in list(self._lives.values()) if life.instance.state != "terminated"]
        return [
            {
                "instance_id": life.instance.id,
                "state": life.instance.state,
                "private_ip": life.instance.private_ip,
                "public_ip": life.instance.public_ip,
                "deadline": life.deadline.strftime("%Y-%m-%dT%H:%M:%SZ") if life.deadline else None,
                **node,
            }
            for life, node in zip(
                lives, self._nodes.describe([life.instance.id for life in lives]), strict=True
            )
        ]

    def end_all(self) -> None:
        """Remove every node, whatever its instance's state; for when the instances themselves are forgotten."""
        for instance_id in list(self._lives):
            self._on_terminate(self._lives[instance_id].instance)
        patience = time.monotonic() + _END_SECONDS
        while any(life.instance.state != "terminated" for life in self._lives.values()):
            if time.monotonic() > patience:
                log.say("some nodes do not end")
                break
            time.sleep(0.01)
        self._lives.clear()

    def interrupt(self, instance_id: str) -> None:
        """Take a spot instance back, as EC2 does when the notice has run out; one that is gone is no error."""
        life = self._lives.get(instance_id)
        if life is not None and life.instance.state not in ("shutting-down", "terminated"):
            spot.close(life.instance, spot.NO_CAPACITY)
            self._on_terminate(life.instance, _INTERRUPTED)

    def _on_end(self, instance_id: str, how: str) -> None:
        """A node has ended by itself: it powered off, wants to boot again, or its machine failed."""
        life = self._lives.get(instance_id)
        if life is None or life.instance.state not in ("pending", "running"):
            return
        log.say(f"{instance_id} ended by itself: {how}")
        if how == "reboot":
            self._in_background(self._reboot, instance_id)
        elif how == "poweroff":
            self._power_off(life)
        else:
            self._in_background(lambda lost: self._give_up(lost, "the machine failed"), instance_id)

    def _on_terminate(self, instance: Any, why: str = "") -> Any:
        with LOCK:
            previous = instance._state
            if previous.name in ("shutting-down", "terminated"):
                return previous
            life = self._lives.get(instance.id)
            if life is None:  # never launched: moto undoes a launch that failed half way
                return self._terminate(instance)
            _set(instance, "shutting-down")
            life.why = why
            if not why:
                _say_who_asked(instance)
            life.hurry.set()
        self._in_background(self._end, instance.id)
        return previous

    def _on_stop(self, instance: Any, why: str = "") -> Any:
        with LOCK:
            previous, life = instance._state, self._lives[instance.id]
            if previous.name not in ("pending", "running"):
                return previous
            _set(instance, "stopping")
            life.why = why
            life.hurry.set()
        self._in_background(self._halt, instance.id)
        return previous

    def _on_start(self, instance: Any) -> Any:
        with LOCK:
            previous = instance._state
            if previous.name != "stopped":
                return previous
            for interface in instance.nics.values():
                interface.start()
            _say(instance, "")
            _set(instance, "pending")
            self._lives[instance.id].hurry.clear()
        self._in_background(self._boot, instance.id)
        return previous

    def _on_reboot(self, instance: Any) -> None:
        with LOCK:
            _refuse(instance, "rebooted", unless=("pending", "running"))
        self._in_background(self._reboot, instance.id)

    def _in_background(self, act: Callable[[_Life], None], instance_id: str) -> None:
        life = self._lives[instance_id]

        def turn() -> None:
            with life.turn:
                try:
                    act(life)
                except Exception:  # nobody else would hear of it
                    log.say(f"{instance_id}: {traceback.format_exc()}")

        threading.Thread(target=turn, name=f"life of {instance_id}", daemon=True).start()

    def _boot(self, life: _Life) -> None:
        if life.instance.state != "pending":
            return
        due = time.monotonic() + self._timing.pending
        try:
            spec = spec_of(life.instance)
            life.deadline = spec.user_data.deadline
            if not self._timing.booting:
                self._nodes.boot(spec)
            life.hurry.wait(max(0.0, due - time.monotonic()))
            with LOCK:
                if life.instance.state == "pending":
                    _set(life.instance, "running")
            if self._timing.booting and not life.hurry.wait(self._timing.booting):
                self._nodes.boot(spec)
        except Exception as error:  # whatever it is: an instance must not stay pending for ever
            log.say(f"{life.instance.id} does not boot: {error}")
            self._give_up(life, str(error))
            return
        self.changed()

    def _give_up(self, life: _Life, why: str) -> None:
        with LOCK:
            if life.instance.state not in ("pending", "running"):
                return  # somebody ends it already, for a reason of their own
            _set(life.instance, "shutting-down")
            life.why = f"Server.InternalError: Internal error on launch ({why})"
        self._finish(life)

    def _end(self, life: _Life) -> None:
        due = time.monotonic() + self._timing.shutting_down
        try:
            self._nodes.halt(life.instance.id)
        finally:  # an instance must not shut down for ever
            time.sleep(max(0.0, due - time.monotonic()))
            self._finish(life)

    def _finish(self, life: _Life) -> None:
        try:
            self._nodes.remove(life.instance.id)
        finally:
            self._ended(life)

    def _ended(self, life: _Life) -> None:
        with LOCK:
            asked = life.instance._reason
            self._terminate(life.instance)
            if life.why:  # after moto's own, which takes every end to be the user's
                _say(life.instance, life.why)
            else:
                life.instance._reason = asked  # the moment of the call; moto's is that of the end
            life.ended = time.monotonic()
        self.changed()

    def _halt(self, life: _Life) -> None:
        if life.instance.state != "stopping":
            return
        self._nodes.halt(life.instance.id)
        with LOCK:
            if life.instance.state != "stopping":
                return
            _set(life.instance, "stopped")
            self._stop(life.instance)
            if life.why:
                _say(life.instance, life.why)

    def _reboot(self, life: _Life) -> None:
        if life.instance.state != "running":
            return
        try:
            self._nodes.halt(life.instance.id)
            self._nodes.boot(spec_of(life.instance))
        except Exception as error:  # as in _boot: it must not be shown as running, with nothing behind it
            log.say(f"{life.instance.id} does not boot again: {error}")
            self._give_up(life, str(error))

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK)
            now = datetime.now(UTC)
            for life in list(self._lives.values()):
                if life.deadline and life.deadline <= now and life.instance.state == "running":
                    try:
                        self._power_off(life)
                    except Exception:  # of one instance: the others' deadlines, and the next try, must come
                        log.say(f"{life.instance.id}: {traceback.format_exc()}")

    def _power_off(self, life: _Life) -> None:
        """What `poweroff` on the node comes to: the instance's own shutdown behaviour."""
        log.say(f"{life.instance.id} reached its deadline")
        behaviour = life.instance.instance_initiated_shutdown_behavior
        if behaviour == "terminate" or spot.is_one_time(life.instance):
            self._on_terminate(life.instance, _POWERED_OFF)
        else:
            self._on_stop(life.instance, _POWERED_OFF)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda instance, *args, **kwargs: hook(instance, *args, **kwargs)


def _set(instance: Any, name: str) -> None:
    # A new object each time: moto hands the old one out as "previous state".
    instance._state = type(instance._state)(name, _CODES[name])


def _say(instance: Any, why: str) -> None:
    """Show `why` ("code: message") as the reason of a state that no call of the user's brought about."""
    instance.state_reason.code, instance.state_reason.message = why.partition(":")[0], why
    instance._reason = ""  # which tells of calls only


def _say_who_asked(instance: Any) -> None:
    """Show that TerminateInstances was called, and when, from the call on: EC2 does so while it shuts down."""
    code = "Client.UserInitiatedShutdown"
    instance.state_reason.code, instance.state_reason.message = code, f"{code}: User initiated shutdown"
    instance._reason = f"User initiated ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} GMT)"


def _refuse(instance: Any, what: str, *, unless: tuple[str, ...]) -> None:
    from moto.ec2.exceptions import EC2ClientError

    if instance.state not in unless:
        raise EC2ClientError(
            "IncorrectInstanceState",
            f"The instance '{instance.id}' is not in a state from which it can be {what}.",
        )
