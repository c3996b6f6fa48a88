"""The errors a user can meet, in three parts: what happened, to which resource, and what to do next.

Every layer raises these; only the command line turns them into text and an exit code. Any other exception is
a bug of cloudddp and is reported as one.

A message may name commands, in backticks. How a command has to be typed depends on the global options of
this run, which only the command line has: it adds them to the commands in a `Message`, never to text that
came from a rank, a node or AWS.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFTOVERS = 3
EXIT_INTERRUPTED = 130
# A command in backticks; in quoted arguments (`q`) there may be backticks, too.
_COMMAND = re.compile(r"""`((?:cloudddp|aws|ssh) (?:'[^']*'|"[^"]*"|[^`'"])+)`""")


class Message(str):
    """A text of ours: `` Message(f"job {job} runs; `cloudddp cancel {q(job)}` stops it") ``.

    Its commands of cloudddp, aws and ssh are shown with the global options of this run (`render`). Values in
    a command are quoted with `q`, text of ranks, nodes and AWS goes through `inert`.
    """

    __slots__ = ()


def q(*words: object) -> str:
    """Return words as a shell reads them."""
    return shlex.join(str(word) for word in words)


def inert(text: str) -> str:
    """Return foreign text without anything that looks like one of our commands."""
    return re.sub("`(?=(cloudddp|aws|ssh) )", "'", text)


def render(text: str, as_typed: Callable[[list[str]], str]) -> str:
    """Return a text as a plain string, each command of a Message as `as_typed` returns it from its words."""

    def typed(found: re.Match[str]) -> str:
        try:
            words = shlex.split(found[1])
        except ValueError:  # no command of ours
            words = []
        return f"`{as_typed(words)}`" if words[1:] else found[0]

    return _COMMAND.sub(typed, text) if isinstance(text, Message) else str(text)


class StepUpdate(str):
    """How far the step is that was reported last: on a terminal it takes the place of that step's text."""

    __slots__ = ()


class StepWarning(str):
    """A warning in the middle of a step, which goes on: `StepWarning("node 1 has no GPU")`."""

    __slots__ = ()

    def __new__(cls, text: str) -> StepWarning:
        return super().__new__(cls, f"warning: {text}")


class WarningWithCommands(StepWarning, Message):
    __slots__ = ()


class Excluded(str):
    """A region or instance type that `up` leaves out, and why: part of the plan."""

    __slots__ = ()


ProgressCallback = Callable[[str], None]  # by which long operations report progress, one sentence at a time


def ignore_progress(_: str) -> None:
    """Report nothing."""


class CloudDDPError(Exception):
    """Something failed. `hint` says what to type or change next; it is a Message.

    `more_nodes` is how many other nodes failed at the same time; set by code that runs a step on several
    nodes.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self._message = message
        self._hint = Message(hint)
        self.more_nodes = 0

    @property
    def message(self) -> str:
        text = self._message + self._details()
        return Message(text) if isinstance(self._message, Message) else text

    def _details(self) -> str:
        more = self.more_nodes
        return f" (and {more} more node{'s' * (more > 1)})" if more else ""

    @property
    def hint(self) -> Message:
        return self._hint

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

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
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

    def __init__(self, message: str, *, renew: str, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint or f"{renew}, then repeat the command", code=code)
        self.renew = renew


def renewal_first(error: BaseException, hint: str) -> str:
    """Return a hint, after how to renew the credentials if they were the reason."""
    return f"{error.renew}, then {hint}" if isinstance(error, CredentialsError) else hint


class NodeError(CloudDDPError):
    """A node could not be reached, or a command on it failed."""


class ConnectionLost(NodeError):
    """The connection to a node broke, or the node did not answer in time. `reason` is the message without
    what was being done."""

    def __init__(self, reason: str, doing: str = "", *, hint: str = "") -> None:
        super().__init__(reason + doing, hint=hint)
        self.reason = reason


class ConnectError(NodeError):
    """No SSH connection to a node.

    `patience` is for how many seconds retrying may help (a booting node), 0 for no retry. `shown` is the host
    key that was refused, as `ssh-ed25519 AAAA...`, or ''. `silent`: no packet came back, so it may not be the
    node. `may_be_booting`: it is the node, and the hint is about its state. `closed_early`: sshd closed the
    connection at once; it may be booting or penalizing this address, and need not be replaced. Code that
    connects to several nodes sets `retried`, the seconds after which it gave up, and `other_node`, its rank
    where others respond: then the cause is the node, not this computer's network.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        patience: float = 0.0,
        shown: str = "",
        silent: bool = False,
        closed_early: bool = False,
        may_be_booting: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.may_be_booting = may_be_booting or closed_early
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
    def hint(self) -> Message:
        if self.other_node is None or self.closed_early:
            return self._hint
        return Message(
            "other nodes answer, so it is the node itself: `cloudddp status` shows its state, `cloudddp "
            f"resume --replace {q(self.other_node)}` replaces it and starts the job again"
        )


class Leftovers(CloudDDPError):
    """Resources may remain after a teardown, and cost money."""

    exit_code = EXIT_LEFTOVERS


class Interrupted(CloudDDPError):
    """Ctrl-C, SIGTERM or SIGHUP, after everything that had to be undone was undone."""

    exit_code = EXIT_INTERRUPTED
