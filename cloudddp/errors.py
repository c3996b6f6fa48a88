"""What can go wrong, in the three parts a user needs: what happened, to which thing, what to type next.

Every room raises these; only the command line's edge turns them into text and an exit code. An exception
that is none of these is a bug of ours and is reported as one.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFTOVERS = 3
EXIT_INTERRUPTED = 130


class CloudDDPError(Exception):
    """Something failed. `hint` is what to type or change next; it is printed on a line of its own."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message  # which a caller that knows more may have added to


class UsageError(CloudDDPError):
    """Bad usage or configuration, found before anything was called."""

    exit_code = EXIT_USAGE


class AWSError(CloudDDPError):
    """AWS refused a call, or could not be reached. `code` is AWS's own error code, or ''."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class NodeError(CloudDDPError):
    """A node could not be reached, or a command on it failed. `reason` is the message without the command, for who
    runs commands that no user has typed; '' where the message names none.
    """

    def __init__(self, message: str, *, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ConnectError(NodeError):
    """No SSH connection to a node. `patience`: for how many seconds waiting may help (a node that boots); 0 if it
    will not. `shown` is the host key that was refused, as `ssh-ed25519 AAAA...`, or ''."""

    def __init__(self, message: str, *, hint: str = "", patience: float = 0.0, shown: str = "") -> None:
        super().__init__(message, hint=hint)
        self.patience = patience
        self.shown = shown


class Leftovers(CloudDDPError):
    """Something is left running or billing after a teardown: the one failure that costs money."""

    exit_code = EXIT_LEFTOVERS


class Interrupted(CloudDDPError):
    """Ctrl-C, SIGTERM or SIGHUP, after everything that had to be undone was undone."""

    exit_code = EXIT_INTERRUPTED
