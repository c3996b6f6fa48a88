"""The command sudo: runs any command as root or as another user of the node."""

from __future__ import annotations

import os
import sys

from . import init_client

_IGNORED = ("-n", "-H", "-S", "--non-interactive")
_DONE = ("-v", "-k", "-K")  # options that run no command
_KEPT = ("TERM", "LANG", "SSH_CONNECTION")


class _Options:
    def __init__(self) -> None:
        self.user = "root"
        self.shell = self.preserve_environment = self.done = False
        self.unsupported = ""


def main(arguments: list[str]) -> int:
    """Run a command with the caller's streams and signals. Returns its exit code."""
    options, rest = _parse(list(arguments))
    if options.unsupported:
        print(f"sudo (simulated node): unsupported option {options.unsupported}", file=sys.stderr)
        return 1
    if options.done:
        return 0
    extra: dict[str, str] = {}
    while rest and "=" in rest[0] and not rest[0].startswith("/"):
        name, _, value = rest.pop(0).partition("=")
        extra[name] = value
    if options.shell:
        import shlex

        rest = ["/bin/bash", "-l", *(["-c", " ".join(map(shlex.quote, rest))] if rest else [])]
    if not rest:
        print("usage: sudo COMMAND [ARGUMENT...]", file=sys.stderr)
        return 1
    kept = {k: v for k, v in os.environ.items() if options.preserve_environment or k in _KEPT}
    message = {
        "verb": "sudo",
        "user": options.user,
        "argv": rest,
        "cwd": os.getcwd(),
        "env": kept | extra,
    }
    reply = init_client.request(message, (0, 1, 2), relay=True)
    if "error" in reply:
        print(f"sudo: {reply['error']}", file=sys.stderr)
    return int(reply.get("exit_code", 1))


def _parse(rest: list[str]) -> tuple[_Options, list[str]]:
    options = _Options()
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in ("-u", "--user") and rest:
            options.user = rest.pop(0)
        elif option.startswith("--user="):
            options.user = option.partition("=")[2]
        elif option in ("-i", "-s", "--login", "--shell"):
            options.shell = True
        elif option in ("-E", "--preserve-env"):
            options.preserve_environment = True
        elif option in _DONE:
            options.done = True
            break
        elif option not in _IGNORED:
            options.unsupported = option
            break
    return options, rest
