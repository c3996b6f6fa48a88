"""How a step of the agent can fail, as errors for the user."""

from __future__ import annotations

from cloudddp.agent import commands
from cloudddp.agent.decode import decode
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.version import VersionConflict
from cloudddp.errors import Command, NodeError
from cloudddp.ssh.running import Result
from cloudddp.text import one_line

LONGEST_REASON = 500  # characters of a node's error text in a message


class RefusedByAgent(NodeError):
    """The agent refuses this step; a retry does not help."""


class NoSuchJob(RefusedByAgent):
    """The node does not know the job."""


class OtherAgentVersion(RefusedByAgent):
    """Jobs run on the node under an agent of another version, so this one must not touch them."""

    def __init__(self, node: int, conflict: VersionConflict) -> None:
        jobs = ", ".join(conflict.jobs)
        super().__init__(
            f"node {node}: job {jobs} runs under agent version {conflict.store}, this cloudddp has version "
            f"{conflict.agent}",
            hint=(
                "wait until it has ended, or cancel it with the cloudddp that started it; ",
                Command("down"),
                " ends the nodes and the job",
            ),
        )
        self.jobs = conflict.jobs


def of_step(step: str, error: NodeError) -> NodeError:
    """Return an error of the connection for the user, who does not know the command."""
    if not error.reason:
        return error
    return NodeError(f"{error.reason}, in step {step!r} of the agent", hint=error.hint, reason=error.reason)


def raise_refusal(node: int, result: Result) -> None:
    if result.exit_code == ExitCode.NO_JOB:
        raise NoSuchJob(f"node {node}: {failure_text(result)}")
    if result.exit_code == ExitCode.OTHER_VERSION:
        try:
            conflict = decode(result.stderr.rstrip().rpartition(b"\n")[2], VersionConflict)
        except ProtocolError:
            return  # an ordinary failure
        raise OtherAgentVersion(node, conflict)


def unreadable(node: int, step: str, error: ProtocolError) -> NodeError:
    """Return the error for a reply that no agent sends: the node runs another program in place of the
    agent."""
    return NodeError(
        f"node {node} sent an answer that cloudddp cannot read (step {step!r} of agent "
        f"{commands.agent_id()}): {error}",
        hint=(
            "a program on that node has replaced the agent or writes into its output; ",
            "look with ",
            Command("ssh", str(node)),
            ", or end the cluster with ",
            Command("down"),
        ),
    )


def failure_text(result: Result) -> str:
    """Return the last line that a command wrote, safe to show, or its exit code where it wrote nothing."""
    if result.exit_code == ExitCode.NO_AGENT and not result.stderr:
        return "the agent's file there is missing or was changed; repeat the command"
    text = (result.stderr or result.stdout)[-(4 * LONGEST_REASON) :].decode(errors="replace")
    lines = text.strip().splitlines()
    return one_line(lines[-1], LONGEST_REASON) if lines else f"exit code {result.exit_code}"


def is_silence(error: Exception) -> bool:
    """Whether a node's connection broke, or it did not answer."""
    return isinstance(error, NodeError) and bool(error.reason)
