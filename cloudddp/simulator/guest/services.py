"""The timers and services of a node, with systemd's states, and its folders for state that persists across
boots."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

from . import child_processes, log, on_node, sshd, units

STAMPS = Path("/var/lib/systemd/timers")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_SUB_STATES = {"failed": "failed", "activating": "start", "active": "running"}


class Services:
    """Safe to use from any thread: `_lock` is held while anything changes."""

    def __init__(self, ssh: sshd.Sshd) -> None:
        self._ssh = ssh
        self.booted = time.time()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._armed: dict[str, tuple[float, float]] = {}  # timer -> `armed` and `since` of units.elapses
        self._elapsed: dict[str, float] = {}
        self._states: dict[str, str] = {}  # service -> active, inactive, failed, activating
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *, wait: bool = True) -> str:
        """Start a timer or a service; with `wait`, wait for a oneshot service. Return an error message or
        ''."""
        if name in sshd.UNITS:
            return self._ssh.start()
        try:
            unit = units.find(name)
            if unit is None:
                return f"Unit {name} not found."
            if unit.unsupported:
                log.write(f"{name}: ignored on a simulated node: {', '.join(unit.unsupported)}")
            if name.endswith(".timer"):
                return self._arm(unit)
            units.commands(unit)  # raises ValueError before any of them runs
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
            self._states[name] = "inactive"
            process = self._running.pop(name, None)
        if process is not None:
            process.terminate()
            try:
                child_processes.wait(process, 3)
            except subprocess.TimeoutExpired:
                process.kill()
        return ""

    def reload(self, name: str) -> str:
        """Reload sshd, the only service that supports it. Return an error message or ''."""
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
        """Return the properties that launchers read, with systemd's values."""
        if name in sshd.UNITS:
            return self._show_ssh()
        try:
            unit, bad = units.find(name), False
        except ValueError:
            unit, bad = None, True
        with self._lock:
            armed = name in self._armed
            pending = self._pending(name)
            state = self._states.get(name, "inactive")
        realtime, monotonic = (next(iter(kind), None) for kind in (pending.realtime, pending.monotonic))
        if name.endswith(".timer"):
            active, sub = (
                ("active", "waiting" if pending.all else "elapsed") if armed else ("inactive", "dead")
            )
        else:
            active, sub = state, _SUB_STATES.get(state, "dead")
        return {
            "Id": name,
            "LoadState": "loaded" if unit else "bad-setting" if bad else "not-found",
            "ActiveState": active,
            "SubState": sub,
            "UnitFileState": self._file_state(unit),
            "FragmentPath": str(unit.path) if unit else "",
            "Result": "exit-code" if state == "failed" else "success",
            "NextElapseUSecRealtime": systemd_time(realtime) if realtime else "",
            "NextElapseUSecMonotonic": f"{monotonic - self.booted:.6f}s" if monotonic else "infinity",
        }

    def timers(self) -> list[dict[str, str]]:
        return [self.show(name) for name in sorted(self._armed)]

    def run_timers(self) -> None:
        """Start services when their timers elapse, and reap orphans. Never returns, and survives any
        error."""
        while True:
            try:
                self._start_next()
                child_processes.reap()
            except Exception as error:  # for example no memory for a thread: the timer is tried again
                log.write(f"timers: {error!r}")
                time.sleep(1.0)

    def _start_next(self) -> None:
        """Start what is due, or wait for it, but at most a second: the clock may be set, or the machine
        suspended."""
        with self._changed:
            pending = [(min(found), name) for name in self._armed if (found := self._pending(name).all)]
            soonest = min(pending, default=None)
            now = time.time()
            if soonest is None or soonest[0] > now:
                self._changed.wait(min(soonest[0] - now, 1.0) if soonest else 1.0)
                return
        self._elapse(soonest[1])
        with self._lock:
            self._elapsed[soonest[1]] = now

    def start_enabled(self) -> None:
        """Start the enabled units, as at every boot."""
        for name in sorted({link.name for link in self._wanted("*")}):
            if problem := self.start(name, wait=False):
                log.write(problem)

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

    def _file_state(self, unit: units.Unit | None) -> str:
        if unit is None:
            return ""
        if not unit.get("Install.WantedBy"):
            return "static"
        return "enabled" if self._wanted(unit.name) else "disabled"

    def _wanted(self, name: str) -> list[Path]:
        return list(units.FOLDERS[0].glob(f"*.wants/{name}"))

    def _arm(self, timer: units.Unit) -> str:
        now = since = time.time()
        if timer.persistent:
            stamp = STAMPS / f"stamp-{timer.name}"
            try:
                # As systemd does: a stamp in the future, of a clock that was ahead, is ignored.
                since = min(stamp.stat().st_mtime, now)
            except OSError:
                _touch(stamp)
        # Raises ValueError before it is armed.
        units.elapses(timer, booted=self.booted, armed=now, since=since)
        with self._changed:
            self._armed[timer.name] = (now, since)
            self._elapsed.pop(timer.name, None)
            self._changed.notify_all()
        return ""

    def _pending(self, name: str) -> units.Elapses:
        """When an armed timer will elapse. A file that has become invalid, or was removed, never elapses."""
        try:
            unit = units.find(name)
            if unit is None or name not in self._armed:
                return units.Elapses((), ())
            armed, since = self._armed[name]
            last = self._elapsed.get(name, 0.0)
            found = units.elapses(unit, booted=self.booted, armed=armed, since=since, last=last)
        except ValueError as error:
            log.write(str(error))
            return units.Elapses((), ())
        return units.Elapses(
            *([at for at in kind if at > last] for kind in (found.realtime, found.monotonic))
        )

    def _elapse(self, name: str) -> None:
        try:
            unit = units.find(name)
        except ValueError:
            return
        if unit is None:
            return
        log.write(f"{unit.name} elapsed: starting {unit.service}")
        if unit.persistent:
            _touch(STAMPS / f"stamp-{name}")
        if problem := self.start(unit.service, wait=False):
            log.write(problem)

    def _run(self, service: units.Unit) -> str:
        self._set_state(service, "activating" if service.oneshot else "active")
        state = "inactive"
        for argv, ignore_failure in units.commands(service):
            try:
                process = child_processes.start(
                    argv, stdin=subprocess.DEVNULL, env=on_node.ENVIRONMENT, cwd="/"
                )
            except OSError as error:
                log.write(f"{service.name}: {error}")
                if not ignore_failure:
                    state = "failed"
                    break
                continue
            with self._lock:
                self._running[service.name] = process
            if not service.oneshot:
                threading.Thread(target=self._watch, args=(service, process), daemon=True).start()
                return ""
            if child_processes.wait(process) and not ignore_failure:
                state = "failed"
                break
        with self._lock:
            self._running.pop(service.name, None)
        self._set_state(service, "active" if state == "inactive" and service.remains_after_exit else state)
        return f"Job for {service.name} failed." if state == "failed" else ""

    def _watch(self, service: units.Unit, process: subprocess.Popen[bytes]) -> None:
        code = child_processes.wait(process)
        with self._lock:
            if self._running.get(service.name) is not process:
                return  # stopped, or started again since
            del self._running[service.name]
        self._set_state(service, "failed" if code else "inactive")

    def _set_state(self, service: units.Unit, state: str) -> None:
        with self._lock:
            self._states[service.name] = state


def _touch(stamp: Path) -> None:
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError as error:  # for example a full disk; the timer counts from now
        log.write(f"{stamp.name}: {error}")


def systemd_time(at: float) -> str:
    # Not strftime's %a: systemd prints English whatever the locale.
    day = time.gmtime(at)
    return f"{_DAYS[day.tm_wday]} {time.strftime('%Y-%m-%d %H:%M:%S', day)} UTC"
