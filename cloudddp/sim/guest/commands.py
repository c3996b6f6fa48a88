"""The commands of a node that talk to its init: systemctl, poweroff and its kin, sudo."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import here

_FLAGS = {
    "--value": "--value", "--now": "--now", "--no-block": "--no-block", "-f": "--force", "-ff": "--force",
    "--force": "--force",
}  # fmt: skip
_QUIET = {
    "-q",
    "--quiet",
    "--no-pager",
    "--no-legend",
    "--plain",
    "--all",
    "-a",
    "--no-ask-password",
    "-l",
    "--full",
}


def ask(request: dict[str, Any], descriptors: tuple[int, ...] = (), *, relay: bool = False) -> dict[str, Any]:
    """The init's answer; `relay` passes on the signals that come meanwhile. Exits where nobody answers."""
    here.require()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(here.SOCKET))
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(line, [data], list(descriptors))
            if sent < len(data):  # sending nothing is an error, too, once the answer is there
                line.sendall(data[sent:])
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if relay else ():
                signal.signal(number, lambda got, _frame: line.send(bytes([got])))
            answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    except OSError as error:
        sys.exit(f"the node's init does not answer: {error}")
    return dict(json.loads(answer)) if answer else {"error": "the node is going down"}


def systemctl(arguments: list[str]) -> int:
    """The verbs on units that launchers use, with systemd's words and exit codes."""
    words: list[str] = []
    properties: list[str] = []
    flags: set[str] = set()
    rest = iter(arguments)
    for word in rest:
        name, _, value = word.partition("=")
        if word in ("-p", "--property", "-P"):
            properties += next(rest, "").split(",")
            flags |= {"--value"} if word == "-P" else set()
        elif name == "--property":
            properties += value.split(",")
        elif word.startswith("-p"):
            properties += word[2:].split(",")
        elif word in _FLAGS:
            flags.add(_FLAGS[word])
        elif word.startswith("-") and word not in _QUIET:
            return _refuse(f"option {word}")
        elif not word.startswith("-"):
            words.append(word)
    verb, names = words[0] if words else "list-units", [_full(name) for name in words[1:]]
    if verb in _WHOLE:
        return _WHOLE[verb](flags)
    if not names:
        return _refuse(f"{verb} without a unit")
    if verb in ("show", "is-active", "is-enabled", "is-failed", "status", "cat"):
        return _look(verb, names, properties, value="--value" in flags)
    if verb in ("start", "stop", "restart", "reload", "enable", "disable"):
        return _change(verb, names, flags)
    return _refuse(verb)


def _change(verb: str, names: list[str], flags: set[str]) -> int:
    steps: tuple[str, ...] = ("stop", "start") if verb == "restart" else (verb,)
    if "--now" in flags:
        steps += ("start",) if verb == "enable" else ("stop",) if verb == "disable" else ()
    for step in steps:
        answer = ask({"do": step, "names": names, "wait": "--no-block" not in flags})
        if "error" in answer:
            print(f"Failed to {step} {' '.join(names)}: {answer['error']}", file=sys.stderr)
            return 5 if "not found" in answer["error"] else 1
    return 0


def _list_timers(_flags: set[str]) -> int:
    print("NEXT UNIT ACTIVATES")
    for unit in ask({"do": "timers"})["units"]:
        print(unit["NextElapseUSecRealtime"] or "-", unit["Id"], unit["Id"].replace(".timer", ".service"))
    return 0


def _is_running(_flags: set[str]) -> int:
    print("running")
    return 0


def _full(name: str) -> str:
    return name if "." in name else f"{name}.service"


def _refuse(what: str) -> int:
    print(f"systemctl (simulated node): {what} is not known here", file=sys.stderr)
    return 1


def _look(verb: str, names: list[str], properties: list[str], *, value: bool) -> int:
    looks: dict[str, Callable[[dict[str, str]], int]] = {
        "show": lambda unit: _show(unit, properties, value=value),
        "is-active": _is_active,
        "is-enabled": _is_enabled,
        "is-failed": _is_failed,
        "status": _status,
        "cat": _cat,
    }
    return max(looks[verb](unit) for unit in ask({"do": "show", "names": names})["units"])


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
    return {"enabled": 0, "disabled": 1}.get(unit["UnitFileState"], 4)


def _is_failed(unit: dict[str, str]) -> int:
    print(unit["ActiveState"])
    return int(unit["ActiveState"] != "failed")


def _status(unit: dict[str, str]) -> int:
    if unit["LoadState"] == "not-found":
        print(f"Unit {unit['Id']} could not be found.", file=sys.stderr)
        return 4
    print(
        f"{unit['Id']}\n   Loaded: {unit['LoadState']}\n   Active: {unit['ActiveState']} ({unit['SubState']})"
    )
    return 0 if unit["ActiveState"] == "active" else 3


def _cat(unit: dict[str, str]) -> int:
    if not unit["FragmentPath"]:
        print(f"No files found for {unit['Id']}.", file=sys.stderr)
        return 1
    print(f"# {unit['FragmentPath']}\n{Path(unit['FragmentPath']).read_text()}", end="")
    return 0


def _power(how: str, *, gently: bool, seconds: float = 0.0) -> int:
    answer = ask({"do": "power", "how": how, "gently": gently, "seconds": seconds})
    if "error" in answer:
        print(f"Failed to {how}: {answer['error']}", file=sys.stderr)
        return 1
    return 0


def power(name: str, arguments: list[str]) -> int:
    """poweroff, halt, reboot, and `shutdown`: now, in so many minutes (one where it is not said), or -c."""
    if name != "shutdown":
        forced = {"-f", "--force"} & set(arguments)
        return _power("reboot" if name == "reboot" else "poweroff", gently=not forced)
    if "-c" in arguments:
        return _power("cancel", gently=True)
    when = next((word for word in arguments if not word.startswith("-")), "+1")
    minutes = "0" if when == "now" else when.removeprefix("+")
    if not minutes.isdecimal():
        print(f"shutdown (simulated node): `now` or minutes, not {when!r}", file=sys.stderr)
        return 1
    how = "reboot" if {"-r", "--reboot"} & set(arguments) else "poweroff"
    return _power(how, gently=True, seconds=60.0 * int(minutes))


def sudo(arguments: list[str]) -> int:
    """Any command, as root or another user of the node, with the caller's own streams and signals."""
    rest, user, shell, everything = list(arguments), "root", False, False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in ("-u", "--user") and rest:
            user = rest.pop(0)
        elif option.startswith("--user="):
            user = option.partition("=")[2]
        elif option in ("-i", "-s", "--login", "--shell"):
            shell = True
        elif option in ("-E", "--preserve-env"):
            everything = True
        elif option in ("-v", "-k", "-K"):
            return 0
        elif option not in ("-n", "-H", "-S", "--non-interactive"):
            print(f"sudo (simulated node): option {option} is not known here", file=sys.stderr)
            return 1
    extra: dict[str, str] = {}
    while rest and "=" in rest[0] and not rest[0].startswith("/"):
        name, _, value = rest.pop(0).partition("=")
        extra[name] = value
    if shell:
        rest = ["/bin/bash", "-l", *(["-c", " ".join(map(shlex.quote, rest))] if rest else [])]
    if not rest:
        print("usage: sudo COMMAND [ARGUMENT...]", file=sys.stderr)
        return 1
    kept = {k: v for k, v in os.environ.items() if everything or k in ("TERM", "LANG", "SSH_CONNECTION")}
    request = {"do": "sudo", "user": user, "argv": rest, "cwd": str(Path.cwd()), "env": {**kept, **extra}}
    answer = ask(request, (0, 1, 2), relay=True)
    if "error" in answer:
        print(f"sudo: {answer['error']}", file=sys.stderr)
    return int(answer.get("exit_code", 1))


_WHOLE: dict[str, Callable[[set[str]], int]] = {  # verbs that are about no unit
    "poweroff": lambda flags: _power("poweroff", gently="--force" not in flags),
    "halt": lambda flags: _power("poweroff", gently="--force" not in flags),
    "reboot": lambda flags: _power("reboot", gently="--force" not in flags),
    "daemon-reload": lambda _flags: 0,  # unit files are read when they are needed
    "is-system-running": _is_running,
    "list-timers": _list_timers,
}
