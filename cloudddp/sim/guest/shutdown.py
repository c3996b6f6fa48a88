"""The commands poweroff, halt, reboot and shutdown."""

from __future__ import annotations

import sys

from . import init_client


def request(action: str, *, force: bool = False, seconds: float = 0.0) -> int:
    """Ask init for `poweroff`, `reboot` or `cancel`. Returns an exit code."""
    reply = init_client.request({"verb": "power", "action": action, "force": force, "seconds": seconds})
    if "error" in reply:
        print(f"Failed to {action}: {reply['error']}", file=sys.stderr)
        return 1
    return 0


def main(name: str, arguments: list[str]) -> int:
    """poweroff, halt and reboot act at once; `shutdown` now, in minutes (1 by default), or -c to cancel."""
    if name != "shutdown":
        force = bool({"-f", "--force"} & set(arguments))
        return request("reboot" if name == "reboot" else "poweroff", force=force)
    if "-c" in arguments:
        return request("cancel")
    when = next((argument for argument in arguments if not argument.startswith("-")), "+1")
    minutes = "0" if when == "now" else when.removeprefix("+")
    if not minutes.isdecimal():
        print(f"shutdown (simulated node): expected `now` or minutes, got {when!r}", file=sys.stderr)
        return 1
    action = "reboot" if {"-r", "--reboot"} & set(arguments) else "poweroff"
    return request(action, seconds=60.0 * int(minutes))
