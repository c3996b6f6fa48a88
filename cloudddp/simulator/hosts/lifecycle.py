"""Connects moto's instances to hosts, so that instance states reflect the state of the hosts.

An instance is `pending` until its host is up and `shutting-down` until every process on it has ended, and it
ends when its host powers off, for example at the deadline that its user data sets.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2 import capacity, encryption, instance_states, instance_status, reservations, spot
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import LOCK
from cloudddp.simulator.guest import log
from cloudddp.simulator.hosts import moto_instances
from cloudddp.simulator.hosts.host_backend import Hosts
from cloudddp.simulator.hosts.moto_instances import set_reason, set_state, set_user_initiated
from cloudddp.simulator.hosts.node_spec import spec_of

_END_SECONDS = 45.0  # longer than processes.kill may take
_MAINTAINED = "Server.ScheduledStop: Stopped due to a scheduled event"
_INTERRUPTED = "Server.SpotInstanceTermination: Instance terminated due to spot interruption"
_POWERED_OFF = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
_DEADLINE_INTERVAL = 0.2  # seconds between two checks
_WITH_HOST = ("pending", "running", "stopping", "shutting-down")


@dataclass(frozen=True, slots=True)
class Timing:
    """Minimum times in seconds that EC2 takes: to run an instance, to answer SSH after that, to end an
    instance, to know a new one everywhere (InvalidInstanceID.NotFound before), and to forget a terminated
    one.
    """

    pending: float = 0.0
    booting: float = 0.0
    shutting_down: float = 0.0
    unknown: float = 0.0
    visible: float = 3600.0


@dataclass(slots=True)
class _Record:
    """One instance. `turn` is a lock held while its host changes; `hurry` ends the wait of a boot."""

    instance: Any
    turn: threading.Lock = field(default_factory=threading.Lock)
    hurry: threading.Event = field(default_factory=threading.Event)
    deadline: datetime | None = None
    reason: str = ""  # why it ends, "code: message" of EC2; '' if the user requested it
    doomed: str = ""  # the reason why it will end instead of running
    created: float = field(default_factory=time.monotonic)
    ended: float | None = None


def run_later(seconds: float, action: Callable[..., None], *arguments: Any) -> None:
    """Call `action` in a thread of its own after so many seconds."""
    timer = threading.Timer(min(max(0.0, seconds), threading.TIMEOUT_MAX), action, arguments)
    timer.daemon = True
    timer.start()


class Lifecycle:
    """The instances of all regions and their hosts. Call `install` once, before the first request."""

    def __init__(self, hosts: Hosts, timing: Timing) -> None:
        self._hosts = hosts
        self._timing = timing
        self.on_change: Callable[[], None] = lambda: None  # called when a host has come up or is gone
        self._records: dict[str, _Record] = {}
        self._moto_terminate: Callable[[Any], Any] = lambda _instance: None
        self._moto_stop: Callable[[Any], Any] = lambda _instance: None

    def install(self) -> None:
        """Install the hooks, and start the thread that watches deadlines if the hosts do not."""
        self._moto_terminate, self._moto_stop = moto_instances.install(self)
        self._hosts.on_end = self._host_ended
        if not self._hosts.runs_timers:
            threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True).start()

    # -- queries -------------------------------------------------------------------------------------------

    def live(self) -> list[Any]:
        """Return moto's instances that have, or will have, a host on the network."""
        instances = [record.instance for record in list(self._records.values())]
        return [instance for instance in instances if instance.state in _WITH_HOST]

    def instance_at(self, private_ip: str) -> Any | None:
        """Return moto's instance that has this address now, or None."""
        return next((instance for instance in self.live() if instance.private_ip == private_ip), None)

    def instance(self, instance_id: str) -> Any:
        """Return moto's instance. Raises KeyError."""
        return self._records[instance_id].instance

    def describe(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each instance of moto's that is not terminated, with a record of it; see control.nodes."""
        records = [one for one in list(self._records.values()) if one.instance.state != "terminated"]
        hosts = self._hosts.describe([record.instance.id for record in records])
        found = []
        for record, host in zip(records, hosts, strict=True):
            instance, deadline = record.instance, self._deadline(record)
            node = {
                "instance_id": instance.id,
                "state": instance.state,
                "private_ip": instance.private_ip,
                "public_ip": instance.public_ip,
                "deadline": deadline.strftime("%Y-%m-%dT%H:%M:%SZ") if deadline else None,
            }
            found.append((instance, {**node, **host}))
        return found

    def visible(self, reservation: Any) -> Any | None:
        """Return the reservation without instances that EC2 does not know yet, or no longer; None if none is
        left."""
        now = time.monotonic()
        instances = []
        for instance in reservation.instances:
            record = self._records.get(instance.id)
            too_new = record is not None and now - record.created < self._timing.unknown
            forgotten = (
                record is not None and record.ended is not None and now - record.ended > self._timing.visible
            )
            if not too_new and not forgotten:
                instances.append(instance)
        reservation.instances = instances
        return reservation if instances else None

    # -- requests ------------------------------------------------------------------------------------------

    def launched(self, instances: list[Any]) -> None:
        for instance in instances:
            self._records[instance.id] = _Record(instance, doomed=encryption.launch_failure(instance))
        failure = CONDITIONS.launch_failure(capacity.zone_of(instances[0])) if instances else None
        if failure is not None:
            for instance in instances[-failure.instances :]:
                self._records[instance.id].doomed = failure.reason
        for instance in instances:
            if (ends := reservations.ends(instance)) is not None:
                run_later((ends - datetime.now(UTC)).total_seconds(), self._end_of_block, instance.id)
            self._in_background(self._boot, instance.id)

    def terminate(self, instance: Any, reason: str = "") -> Any:
        with LOCK:
            previous = instance._state
            if previous.name in ("shutting-down", "terminated"):
                return previous
            record = self._records.get(instance.id)
            if record is None:  # moto undoes a launch that failed
                return self._moto_terminate(instance)
            set_state(instance, "shutting-down")
            record.reason = reason
            if reason:
                set_reason(instance, reason)
            else:
                set_user_initiated(instance)
            record.hurry.set()
        self._in_background(self._end, instance.id)
        return previous

    def stop(self, instance: Any, reason: str = "") -> Any:
        with LOCK:
            previous, record = instance._state, self._records[instance.id]
            if previous.name not in ("pending", "running"):
                return previous
            set_state(instance, "stopping")
            record.reason = reason
            record.hurry.set()
        self._in_background(self._halt, instance.id)
        return previous

    def start(self, instance: Any) -> Any:
        with LOCK:
            previous = instance._state
            if previous.name != "stopped":
                return previous
            for interface in instance.nics.values():
                interface.start()
            set_reason(instance, "")
            set_state(instance, "pending")
            self._records[instance.id].hurry.clear()
        self._in_background(self._boot, instance.id)
        return previous

    def reboot(self, instance: Any) -> None:
        with LOCK:
            instance_states.check_states((instance,), ("pending", "running"), "rebooted")
        self._in_background(self._reboot, instance.id)

    def interrupt(self, instance_id: str) -> None:
        """Terminate a spot instance whose notice has expired. No error if it has ended already."""
        record = self._records.get(instance_id)
        if record is not None and record.instance.state not in ("shutting-down", "terminated"):
            spot.close(record.instance, spot.NO_CAPACITY)
            self.terminate(record.instance, _INTERRUPTED)

    def maintain(self, instance_id: str, event: instance_status.ScheduledEvent) -> None:
        """Let a scheduled event take place. No error if the instance does not run."""
        record = self._records.get(instance_id)
        if record is None or record.instance.state != "running":
            return
        effect = instance_status.CODES[event.code][1]
        if effect == instance_status.REBOOT:
            self.reboot(record.instance)
        elif effect == instance_status.STOP and spot.is_one_time(record.instance):
            self.terminate(record.instance, _MAINTAINED)
        elif effect == instance_status.STOP:
            self.stop(record.instance, _MAINTAINED)
        instance_status.complete(record.instance, event)

    def _end_of_block(self, instance_id: str) -> None:
        record = self._records.get(instance_id)
        if record is not None and record.instance.state not in ("shutting-down", "terminated"):
            self.terminate(record.instance, reservations.EXPIRED)

    def end_all(self) -> None:
        """Remove all hosts and forget the instances."""
        for instance_id in list(self._records):
            self.terminate(self._records[instance_id].instance)
        deadline = time.monotonic() + _END_SECONDS
        while any(record.instance.state != "terminated" for record in self._records.values()):
            if time.monotonic() > deadline:
                log.write("some nodes do not end")
                break
            time.sleep(0.01)
        self._records.clear()

    # -- events --------------------------------------------------------------------------------------------

    def _host_ended(self, instance_id: str, ending: str) -> None:
        """React to the end of a host that was not requested: poweroff, reboot or crash."""
        record = self._records.get(instance_id)
        if record is None or record.instance.state not in ("pending", "running"):
            return
        log.write(f"{instance_id} ended by itself: {ending}")
        if ending == "reboot":
            self._in_background(self._reboot, instance_id)
        elif ending == "poweroff":
            self._powered_off(record)
        else:
            self._in_background(lambda failed: self._fail(failed, "the machine failed"), instance_id)

    def _powered_off(self, record: _Record) -> None:
        """Apply the instance's shutdown behavior."""
        log.write(f"{record.instance.id} powered off")
        behavior = record.instance.instance_initiated_shutdown_behavior
        if behavior == "terminate" or spot.is_one_time(record.instance):
            self.terminate(record.instance, _POWERED_OFF)
        else:
            self.stop(record.instance, _POWERED_OFF)

    def _watch_deadlines(self) -> None:
        while True:
            time.sleep(_DEADLINE_INTERVAL)
            now = datetime.now(UTC)
            for record in [one for one in list(self._records.values()) if one.instance.state == "running"]:
                if (deadline := self._deadline(record)) and deadline <= now:
                    try:
                        self._powered_off(record)
                    except Exception:  # the thread must continue: other deadlines, and the next attempt
                        log.write(f"{record.instance.id}: {traceback.format_exc()}")

    def _deadline(self, record: _Record) -> datetime | None:
        return self._hosts.moved_deadline(record.instance.id) or record.deadline

    # -- transitions, each in a thread of its own ----------------------------------------------------------

    def _in_background(self, transition: Callable[[_Record], None], instance_id: str) -> None:
        record = self._records[instance_id]

        def run() -> None:
            with record.turn:
                try:
                    transition(record)
                except Exception:  # in a thread: no caller gets it
                    log.write(f"{instance_id}: {traceback.format_exc()}")

        threading.Thread(target=run, name=f"lifecycle of {instance_id}", daemon=True).start()

    def _boot(self, record: _Record) -> None:
        if record.instance.state != "pending":
            return
        running_at = time.monotonic() + self._timing.pending
        if record.doomed:
            record.hurry.wait(self._timing.pending)
            self.terminate(record.instance, record.doomed)
            return
        try:
            spec = spec_of(record.instance)
            record.deadline = spec.user_data.deadline
            # A namespace node waits by itself, so that its timers run meanwhile; a machine does not wait.
            instance_status.set_failing(record.instance, False)
            booting = self._timing.booting + (0.0 if self._hosts.runs_timers else spec.boot.ssh_seconds)
            if not booting:
                self._hosts.boot(spec)
            record.hurry.wait(max(0.0, running_at - time.monotonic()))
            with LOCK:
                if record.instance.state == "pending":
                    set_state(record.instance, "running")
            if booting and not record.hurry.wait(booting):
                self._hosts.boot(spec)
        except Exception as error:  # after any error: the instance must not stay pending
            log.write(f"{record.instance.id} does not boot: {error}")
            self._fail(record, str(error))
            return
        self.on_change()

    def _reboot(self, record: _Record) -> None:
        if record.instance.state != "running":
            return
        try:
            self._hosts.halt(record.instance.id)
            instance_status.set_failing(record.instance, False)
            self._hosts.boot(spec_of(record.instance))
        except Exception as error:  # as in _boot: it must not be shown as running without a host
            log.write(f"{record.instance.id} does not reboot: {error}")
            self._fail(record, str(error))

    def _halt(self, record: _Record) -> None:
        if record.instance.state != "stopping":
            return
        self._hosts.halt(record.instance.id)
        with LOCK:
            if record.instance.state != "stopping":
                return
            set_state(record.instance, "stopped")
            self._moto_stop(record.instance)
            if record.reason:
                set_reason(record.instance, record.reason)

    def _fail(self, record: _Record, why: str) -> None:
        with LOCK:
            if record.instance.state not in ("pending", "running"):
                return  # it is ending already, for another reason
            set_state(record.instance, "shutting-down")
            record.reason = f"Server.InternalError: Internal error on launch ({why})"
        self._remove(record)

    def _end(self, record: _Record) -> None:
        ended_at = time.monotonic() + self._timing.shutting_down
        try:
            self._hosts.halt(record.instance.id)
        finally:  # after any error: the instance must not stay shutting-down
            time.sleep(max(0.0, ended_at - time.monotonic()))
            self._remove(record)

    def _remove(self, record: _Record) -> None:
        try:
            self._hosts.remove(record.instance.id)
        finally:
            self._terminated(record)

    def _terminated(self, record: _Record) -> None:
        with LOCK:
            reason_of_call = record.instance._reason
            self._moto_terminate(record.instance)
            if record.reason:  # moto has set its own: requested by the user
                set_reason(record.instance, record.reason)
            else:
                # It has the time of the call; moto's has the time of the end.
                record.instance._reason = reason_of_call
            record.ended = time.monotonic()
        self.on_change()
