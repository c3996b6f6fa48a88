"""What is armed and what has run on a node: timers that elapse, services that they or somebody starts.

Knows systemd's words for their states, and where systemd keeps what must outlive a boot. Acts on the node it is on.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

from . import children, log, sshd, units

STAMPS = Path("/var/lib/systemd/timers")
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Services:
    """Calls come from threads; `_lock` is held while anything changes."""

    def __init__(self, ssh: sshd.Sshd) -> None:
        self._ssh = ssh
        self.booted = time.time()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._armed: dict[str, tuple[float, float]] = {}  # timer -> when it was started, moments count since
        self._fired: dict[str, float] = {}
        self._results: dict[str, str] = {}  # service -> active, inactive, failed, activating
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *, wait: bool = True) -> str:
        """Start a timer or a service; returns '' or what is wrong. `wait`: until a oneshot service has ended."""
        if name in sshd.UNITS:
            return self._ssh.start()
        try:
            unit = units.find(name)
            if unit is None:
                return f"Unit {name} not found."
            if unit.disobeyed:
                log.say(f"{name}: not obeyed on a simulated node: {', '.join(unit.disobeyed)}")
            if name.endswith(".timer"):
                return self._arm(unit)
            units.commands(unit)  # raises ValueError before anything has run
        except ValueError as error:
            return f"Unit {name} has a bad unit file setting: {error}"
        if not wait:
            threading.Thread(target=self._run, args=(unit,), daemon=True).start()
            return ""
        return self._run(unit)

    def stop(self, name: str) -> str:
        if name in sshd.UNITS:
            return self._ssh.stop()
        with self._lock:
            self._armed.pop(name, None)
            self._results[name] = "inactive"
            running = self._running.pop(name, None)
        if running is not None:
            running.terminate()
            try:
                children.wait(running, 3)
            except subprocess.TimeoutExpired:
                running.kill()
        return ""

    def reload(self, name: str) -> str:
        """Have sshd, and nothing else, read its configuration and keys again; returns '' or what is wrong."""
        if name in sshd.UNITS:
            return self._ssh.reload()
        return f"Job type reload is not applicable for unit {name}."

    def enable(self, name: str) -> str:
        try:
            unit = units.find(name)
        except ValueError as error:
            return str(error)
        if unit is None or unit.path is None:
            return f"Unit file {name} does not exist."
        for target in " ".join(unit.get("Install.WantedBy")).split():
            wants = units.FOLDERS[0] / f"{target}.wants"
            wants.mkdir(parents=True, exist_ok=True)
            (wants / name).unlink(missing_ok=True)
            (wants / name).symlink_to(unit.path)
        return ""

    def disable(self, name: str) -> str:
        for link in self._wanted(name):
            link.unlink()
        return ""

    def show(self, name: str) -> dict[str, str]:
        """The properties that launchers ask for, with systemd's own words."""
        if name in sshd.UNITS:
            return self._show_ssh()
        try:
            unit, bad = units.find(name), False
        except ValueError:
            unit, bad = None, True
        with self._lock:
            armed = self._armed.get(name)
            times = self._times(name)
            result = self._results.get(name, "inactive")
        by_calendar, counted = (next(iter(kind), None) for kind in (times.calendar, times.counted))
        if name.endswith(".timer"):
            waiting = by_calendar is not None or counted is not None
            active, sub = ("active", "waiting" if waiting else "elapsed") if armed else ("inactive", "dead")
        else:
            active, sub = (
                result,
                {"failed": "failed", "activating": "start", "active": "running"}.get(result, "dead"),
            )
        return {
            "Id": name,
            "LoadState": "loaded" if unit else "bad-setting" if bad else "not-found",
            "ActiveState": active,
            "SubState": sub,
            "UnitFileState": "" if not unit else "enabled" if self._wanted(name) else "disabled",
            "FragmentPath": str(unit.path) if unit else "",
            "Result": "exit-code" if result == "failed" else "success",
            "NextElapseUSecRealtime": _stamp(by_calendar) if by_calendar else "",
            "NextElapseUSecMonotonic": f"{counted - self.booted:.6f}s" if counted else "infinity",
        }

    def timers(self) -> list[dict[str, str]]:
        return [self.show(name) for name in sorted(self._armed)]

    def keep_time(self) -> None:
        """Start what timers name, when they elapse. Never returns, and nothing that goes wrong ends it."""
        while True:
            try:
                self._start_next()
                children.reap()
            except Exception as error:  # for example no threads or memory: a timer that is due is tried again
                log.say(f"timers: {error!r}")
                time.sleep(1.0)

    def _start_next(self) -> None:
        """Start what is due, or wait for it: a second at most, since the clock may be set, or the machine sleep."""
        with self._changed:
            pending = [(min(found), name) for name in self._armed if (found := self._times(name).all)]
            soonest = min(pending, default=None)
            now = time.time()
            if soonest is None or soonest[0] > now:
                self._changed.wait(min(soonest[0] - now, 1.0) if soonest else 1.0)
                return
        self._elapse(soonest[1])
        with self._lock:
            self._fired[soonest[1]] = now

    def start_wanted(self) -> None:
        """What was enabled, as at every boot."""
        for name in sorted({link.name for link in self._wanted("*")}):
            if problem := self.start(name, wait=False):
                log.say(problem)

    def _show_ssh(self) -> dict[str, str]:
        running = self._ssh.running
        return {
            "Id": sshd.UNITS[0],
            "LoadState": "loaded",
            "ActiveState": "active" if running else "inactive",
            "SubState": "running" if running else "dead",
            "UnitFileState": "enabled",
            "FragmentPath": "",
            "Result": "success",
        }

    def _wanted(self, name: str) -> list[Path]:
        return list(units.FOLDERS[0].glob(f"*.wants/{name}"))

    def _arm(self, timer: units.Unit) -> str:
        now = since = time.time()
        if timer.persistent:
            stamp = STAMPS / f"stamp-{timer.name}"
            try:
                # As systemd: the stamp of a clock that was ahead says nothing.
                since = min(stamp.stat().st_mtime, now)
            except OSError:
                _touch(stamp)
        units.elapses(
            timer, booted=self.booted, armed=now, since=since
        )  # raises ValueError for what it cannot read
        with self._changed:
            self._armed[timer.name] = (now, since)
            self._fired.pop(timer.name, None)
            self._changed.notify_all()
        return ""

    def _times(self, name: str) -> units.Times:
        """What is still to come of an armed timer. A file that was spoiled since, or taken away, has no times."""
        try:
            unit = units.find(name)
            if unit is None or name not in self._armed:
                return units.Times((), ())
            armed, since = self._armed[name]
            found = units.elapses(unit, booted=self.booted, armed=armed, since=since)
        except ValueError as error:
            log.say(str(error))
            return units.Times((), ())
        after = self._fired.get(name, 0.0)
        return units.Times(*([at for at in kind if at > after] for kind in (found.calendar, found.counted)))

    def _elapse(self, name: str) -> None:
        try:
            unit = units.find(name)
        except ValueError:
            return
        if unit is None:
            return
        log.say(f"{unit.name} elapsed: starting {unit.service}")
        if unit.persistent:
            _touch(STAMPS / f"stamp-{name}")
        if problem := self.start(unit.service, wait=False):
            log.say(problem)

    def _run(self, service: units.Unit) -> str:
        self._say(service, "activating" if service.oneshot else "active")
        result = "inactive"
        for argv, forgiven in units.commands(service):
            try:
                running = children.start(argv, stdin=subprocess.DEVNULL, env=_ENVIRONMENT, cwd="/")
            except OSError as error:
                log.say(f"{service.name}: {error}")
                if not forgiven:
                    result = "failed"
                    break
                continue
            with self._lock:
                self._running[service.name] = running
            if not service.oneshot:
                threading.Thread(target=self._watch, args=(service, running), daemon=True).start()
                return ""
            if children.wait(running) and not forgiven:
                result = "failed"
                break
        with self._lock:
            self._running.pop(service.name, None)
        self._say(service, "active" if result == "inactive" and service.stays else result)
        return f"Job for {service.name} failed." if result == "failed" else ""

    def _watch(self, service: units.Unit, running: subprocess.Popen[bytes]) -> None:
        code = children.wait(running)
        with self._lock:
            if self._running.get(service.name) is not running:
                return  # stopped, or started again since
            del self._running[service.name]
        self._say(service, "failed" if code else "inactive")

    def _say(self, service: units.Unit, state: str) -> None:
        with self._lock:
            self._results[service.name] = state


def _touch(stamp: Path) -> None:
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError as error:  # a full disk; the timer counts from now
        log.say(f"{stamp.name}: {error}")


def _stamp(at: float) -> str:
    # Not strftime's %a: systemd prints English whatever the locale.
    day = time.gmtime(at)
    return f"{_DAYS[day.tm_wday]} {time.strftime('%Y-%m-%d %H:%M:%S', day)} UTC"
