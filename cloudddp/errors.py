"""The errors a user can meet, in three parts: what happened, to which resource, and what to do next.

Every layer raises these; only the command line turns them into text and an exit code. Any other exception is
a bug of cloudddp and is reported as one.

A hint may contain commands of cloudddp. They are data (`Command`), not text, because how a command has to be
typed depends on the global options of this run, which only the command line has.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFTOVERS = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, init=False)
class Command:
    """A command that a message suggests, without the global options: `Command("logs", "-f", job)`."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)


class ToolCommand(Command):
    """A command of another program that a message suggests: `ToolCommand("aws", "ec2", ...)`, or `ssh`.

    It acts on this run's account or nodes, which its options and, with --sim, `cloudddp sim exec` choose:
    without them it would act on the user's own account.
    """

    __slots__ = ()


Part = str | Command
Text = Part | tuple[Part, ...]  # ("repeat ", Command("down")) reads "repeat `cloudddp down`"


class StepUpdate(str):
    """How far the step is that was reported last: on a terminal it takes the place of that step's text."""

    __slots__ = ()


ProgressCallback = Callable[[Text], None]  # by which long operations report progress, one sentence at a time


def ignore_progress(_: Text) -> None:
    """Report nothing."""


def parts(text: Text) -> tuple[Part, ...]:
    return text if isinstance(text, tuple) else (text,)


def command_line(command: Command) -> str:
    """Return a command as it is typed without any global option."""
    return shlex.join([*([] if isinstance(command, ToolCommand) else ["cloudddp"]), *command.words])


def render(text: Text, as_typed: Callable[[Command], str] = command_line) -> str:
    """Return a message as a string, its commands in backticks."""
    return "".join(f"`{as_typed(part)}`" if isinstance(part, Command) else part for part in parts(text))


class CloudDDPError(Exception):
    """Something failed. `hint` says what to type or change next; `advice` is the same, with its commands as
    data.

    `more_nodes` is how many other nodes failed at the same time; set by code that runs a step on several
    nodes.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: Text = "") -> None:
        super().__init__(message)
        self._message = message
        self._advice = hint
        self.more_nodes = 0

    @property
    def message(self) -> str:
        return self._message + self._details()

    def _details(self) -> str:
        more = self.more_nodes
        return f" (and {more} more node{'s' * (more > 1)})" if more else ""

    @property
    def advice(self) -> Text:
        return self._advice

    @property
    def hint(self) -> str:
        return render(self.advice)

    def __str__(self) -> str:
        return self.message


class UsageError(CloudDDPError):
    """Bad usage or configuration, found before anything was called."""

    exit_code = EXIT_USAGE


class NotConfirmed(CloudDDPError):
    """The user has answered a question with no."""

    def __init__(self) -> None:
        super().__init__("not confirmed; nothing was changed")


class AWSError(CloudDDPError):
    """AWS refused a call, or could not be reached. `code` is AWS's own error code, or ''.

    `retries`: how often botocore had repeated the call before this answer; an earlier attempt may have had an
    effect. `transient`: AWS did not answer, answered with HTTP status 5xx, or throttled the call, so that it
    may work later. `unsent`: there was no connection; that of an earlier attempt may have been lost.
    `organization`: a policy of the organization denies the call.
    """

    def __init__(self, message: str, *, hint: Text = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.retries = 0
        self.transient = False
        self.unsent = False
        self.organization = False


class CredentialsError(AWSError):
    """AWS credentials are missing, have ended, or are refused.

    `renew` is how to renew them, as a phrase that ", then ..." can follow: after a teardown that failed for
    this reason its error says so.
    """

    def __init__(self, message: str, *, renew: Text, hint: Text = "", code: str = "") -> None:
        super().__init__(message, hint=hint or (*parts(renew), ", then repeat the command"), code=code)
        self.renew = renew


def renewal_first(error: BaseException, *hint: Part) -> Text:
    """Return a hint, after how to renew the credentials if they were the reason."""
    return (*parts(error.renew), ", then ", *hint) if isinstance(error, CredentialsError) else hint


class NodeError(CloudDDPError):
    """A node could not be reached, or a command on it failed.

    `reason` is the message without the command, for callers whose commands are internal; '' if the message
    does not name a command.
    """

    def __init__(self, message: str, *, hint: Text = "", reason: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ConnectError(NodeError):
    """No SSH connection to a node.

    `patience` is for how many seconds retrying may help (a booting node), 0 for no retry. `shown` is the host
    key that was refused, as `ssh-ed25519 AAAA...`, or ''. `silent`: no packet came back, so it may not be the
    node. `closed_early`: sshd closed the connection at once; it may be booting or penalizing this address,
    and need not be replaced. Code that connects to several nodes sets `retried`, the seconds after which it
    gave up, and `other_node`, its rank where others respond: then the cause is the node, not this computer's
    network.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: Text = "",
        patience: float = 0.0,
        shown: str = "",
        silent: bool = False,
        closed_early: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.closed_early = closed_early
        self.patience = patience
        self.silent = silent
        self.shown = shown
        self.retried: float | None = None
        self.other_node: int | None = None

    def _details(self) -> str:
        gave_up = "" if self.retried is None else f"; gave up after {self.retried:.0f} s"
        return gave_up + super()._details()

    @property
    def advice(self) -> Text:
        if self.other_node is None or self.closed_early:
            return self._advice
        return (
            "other nodes answer, so it is the node itself: ",
            Command("status"),
            " shows its state, ",
            Command("resume", "--replace", str(self.other_node)),
            " replaces it and starts the job again",
        )


class Leftovers(CloudDDPError):
    """Resources may remain after a teardown, and cost money."""

    exit_code = EXIT_LEFTOVERS


class Interrupted(CloudDDPError):
    """Ctrl-C, SIGTERM or SIGHUP, after everything that had to be undone was undone."""

    exit_code = EXIT_INTERRUPTED
