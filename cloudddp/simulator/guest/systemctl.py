"""The command systemctl: the verbs that launchers use, with systemd's output and exit codes.

poweroff, halt, reboot and shutdown are here too: on a real machine they are links to systemctl.
"""

from __future__ import annotations

import sys

from .init_client import request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FLAGS = {
    "--value": "--value",
    "--now": "--now",
    "--no-block": "--no-block",
    "-f": "--force",
    "-ff": "--force",
    "--force": "--force",
}
_IGNORED = {
    *("-q", "--quiet", "-a", "--all", "-l", "--full"),
    *("--plain", "--no-pager", "--no-legend", "--no-ask-password"),
}
_QUERIES = ("show", "is-active", "is-enabled", "is-failed", "status", "cat")
_CHANGES = ("start", "stop", "restart", "reload", "enable", "disable")


class _Arguments:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.properties: list[str] = []
        self.flags: set[str] = set()
        self.unsupported = ""


def main(arguments: list[str]) -> int:
    """Run one verb of systemctl. Returns its exit code."""
    parsed = _parse(arguments)
    if parsed.unsupported:
        return _unsupported(f"option {parsed.unsupported}")
    verb = parsed.words[0] if parsed.words else "list-units"
    names = [name if "." in name else f"{name}.service" for name in parsed.words[1:]]
    if verb in _WITHOUT_UNITS:
        return _WITHOUT_UNITS[verb](parsed.flags)
    if not names:
        return _unsupported(f"{verb} without a unit")
    if verb in _QUERIES:
        return _query(verb, names, parsed.properties, value="--value" in parsed.flags)
    if verb in _CHANGES:
        return _change(verb, names, parsed.flags)
    return _unsupported(verb)


def _parse(arguments: list[str]) -> _Arguments:
    parsed = _Arguments()
    rest = iter(arguments)
    for word in rest:
        name, _, value = word.partition("=")
        if word in ("-p", "--property", "-P"):
            parsed.properties += next(rest, "").split(",")
            parsed.flags |= {"--value"} if word == "-P" else set()
        elif name == "--property":
            parsed.properties += value.split(",")
        elif word.startswith("-p"):
            parsed.properties += word[2:].split(",")
        elif word in _FLAGS:
            parsed.flags.add(_FLAGS[word])
        elif word.startswith("-") and word not in _IGNORED:
            parsed.unsupported = word
            break
        elif not word.startswith("-"):
            parsed.words.append(word)
    return parsed


def _unsupported(what: str) -> int:
    print(f"systemctl (simulated node): unsupported: {what}", file=sys.stderr)
    return 1


def _change(verb: str, names: list[str], flags: set[str]) -> int:
    steps: tuple[str, ...] = ("stop", "start") if verb == "restart" else (verb,)
    if "--now" in flags:
        steps += {"enable": ("start",), "disable": ("stop",)}.get(verb, ())
    for step in steps:
        reply = request({"verb": step, "names": names, "wait": "--no-block" not in flags})
        if "error" in reply:
            print(f"Failed to {step} {' '.join(names)}: {reply['error']}", file=sys.stderr)
            return 5 if "not found" in reply["error"] else 1
    return 0


def _query(verb: str, names: list[str], properties: list[str], *, value: bool) -> int:
    queries: dict[str, Callable[[dict[str, str]], int]] = {
        "show": lambda unit: _show(unit, properties, value=value),
        "is-active": _is_active,
        "is-enabled": _is_enabled,
        "is-failed": _is_failed,
        "status": _status,
        "cat": _cat,
    }
    return max(queries[verb](unit) for unit in request({"verb": "show", "names": names})["units"])


def _show(unit: dict[str, str], properties: list[str], *, value: bool) -> int:
    for name in properties or list(unit):
        if name in unit:
            print(unit[name] if value else f"{name}={unit[name]}")
    return 0


def _is_active(unit: dict[str, str]) -> int:
    print(unit["ActiveState"])
    return 0 if unit["ActiveState"] == "active" else 3


def _is_enabled(unit: dict[str, str]) -> int:
    print(unit["UnitFileState"] or "not-found")
    return {"enabled": 0, "static": 0, "disabled": 1}.get(unit["UnitFileState"], 4)


def _is_failed(unit: dict[str, str]) -> int:
    print(unit["ActiveState"])
    return int(unit["ActiveState"] != "failed")


def _status(unit: dict[str, str]) -> int:
    if unit["LoadState"] == "not-found":
        print(f"Unit {unit['Id']} could not be found.", file=sys.stderr)
        return 4
    print(unit["Id"])
    print(f"   Loaded: {unit['LoadState']}")
    print(f"   Active: {unit['ActiveState']} ({unit['SubState']})")
    return 0 if unit["ActiveState"] == "active" else 3


def _cat(unit: dict[str, str]) -> int:
    if not unit["FragmentPath"]:
        print(f"No files found for {unit['Id']}.", file=sys.stderr)
        return 1
    with open(unit["FragmentPath"]) as file:
        print(f"# {unit['FragmentPath']}\n{file.read()}", end="")
    return 0


def _list_timers(_flags: set[str]) -> int:
    print("NEXT UNIT ACTIVATES")
    for unit in request({"verb": "timers"})["units"]:
        print(unit["NextElapseUSecRealtime"] or "-", unit["Id"], unit["Id"].replace(".timer", ".service"))
    return 0


def _is_system_running(_flags: set[str]) -> int:
    print("running")
    return 0


def _power(action: str, *, force: bool = False, seconds: float = 0.0) -> int:
    """Ask init for `poweroff`, `reboot` or `cancel`. Returns an exit code."""
    reply = request({"verb": "power", "action": action, "force": force, "seconds": seconds})
    if "error" in reply:
        print(f"Failed to {action}: {reply['error']}", file=sys.stderr)
        return 1
    return 0


def power(name: str, arguments: list[str]) -> int:
    """poweroff, halt and reboot act at once; `shutdown` now, in minutes (1 by default), or -c to cancel."""
    if name != "shutdown":
        force = bool({"-f", "--force"} & set(arguments))
        return _power("reboot" if name == "reboot" else "poweroff", force=force)
    if "-c" in arguments:
        return _power("cancel")
    when = next((argument for argument in arguments if not argument.startswith("-")), "+1")
    minutes = "0" if when == "now" else when.removeprefix("+")
    if not minutes.isdecimal():
        print(f"shutdown (simulated node): expected `now` or minutes, got {when!r}", file=sys.stderr)
        return 1
    action = "reboot" if {"-r", "--reboot"} & set(arguments) else "poweroff"
    return _power(action, seconds=60.0 * int(minutes))


_WITHOUT_UNITS: dict[str, Callable[[set[str]], int]] = {
    "poweroff": lambda flags: _power("poweroff", force="--force" in flags),
    "halt": lambda flags: _power("poweroff", force="--force" in flags),
    "reboot": lambda flags: _power("reboot", force="--force" in flags),
    "daemon-reload": lambda _flags: 0,  # unit files are read when they are needed
    "is-system-running": _is_system_running,
    "list-timers": _list_timers,
}
