"""The options of `start`: validates them, and compares them with a simulator that is already running."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.errors import UsageError
from cloudddp.simulator.control.record import Simulator
from cloudddp.simulator.iam import documents

KINDS = ("auto", "namespace", "machine", "process")

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")  # valid for Linux, and not misread by `ip`
_MAX_POLICY = 1 << 20  # bytes; IAM's limit is far lower
_RESERVED = ("lo", "all", "default")  # the last two are in /proc/sys/net


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A file with a policy that AWS would accept. `description` is its path and a hash of its content."""

    path: Path
    policy: documents.Policy
    description: str


def read_policy(path: Path) -> PolicyFile:
    """Return the policy in a file. Raises UsageError if it cannot be read or is not valid."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device could be read without end
            raise UsageError(f"cannot read the policy {path}: not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_POLICY)
        policy = documents.parse(content.decode())
    except OSError as error:
        raise UsageError(f"cannot read the policy {path}: {error.strerror}") from None
    except ValueError as error:  # InvalidPolicy is one, UnicodeDecodeError too
        raise UsageError(f"{path} is not a policy: {error}") from None
    path = path.resolve()
    return PolicyFile(path, policy, f"{path} (sha256 {hashlib.sha256(content).hexdigest()[:12]})")


def denies_everything(path: Path) -> bool:
    """Return whether the policy in a file allows nothing. Raises UsageError as read_policy does."""
    return read_policy(path).policy.denies_everything


@dataclass(frozen=True, slots=True)
class Options:
    """Port 0 means any. `interfaces` are the names that the nodes' interfaces get in turn. `timing` overrides
    TIMING.

    `policies` limits callers, by kind: `policy` the user that the simulator's key belongs to, `scp` the whole
    account.
    """

    port: int = 0
    ssh_port: int = 0
    nodes: str = "auto"
    interfaces: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    policies: Mapping[str, PolicyFile] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UsageError for an unknown kind of nodes, or an interface name that is invalid or has no
        effect."""
        if self.nodes not in KINDS:
            raise UsageError(
                f"unknown kind of nodes {self.nodes!r}",
                hint=f"--nodes, or CLOUDDDP_SIM_NODES: {', '.join(KINDS)}",
            )
        for name in self.interfaces:
            if not _INTERFACE.fullmatch(name) or name in _RESERVED:
                raise UsageError(
                    f"invalid interface name {name!r}",
                    hint="1 to 15 letters, digits, '.', '_' or '-', as in --interface enp71s0; not lo, all "
                    "or default",
                )
        if self.interfaces and self.nodes == "process":
            raise UsageError(
                "process nodes have no interface of their own, so it cannot be named",
                hint="leave out --interface, or use --nodes namespace",
            )

    def arguments(self) -> list[str]:
        """Return the arguments for the server."""
        return [
            *("--port", str(self.port), "--ssh-port", str(self.ssh_port), "--nodes", self.nodes),
            *self._common_words(),
        ]

    def _common_words(self) -> list[str]:
        return [
            *(word for name in self.interfaces for word in ("--interface", name)),
            *(word for name, value in self.timing.items() for word in (f"--{name}-seconds", str(value))),
            *(word for kind, file in self.policies.items() for word in (f"--{kind}", str(file.path))),
        ]

    def differences(self, running: Simulator) -> list[str]:
        """Return the options of a running simulator that differ from those requested here, as text."""
        port = int(running.endpoint.rpartition(":")[2])
        found = []
        if self.nodes not in ("auto", running.nodes):
            found.append(f"{running.nodes} nodes")
        if self.port not in (0, port):
            found.append(f"--port {port}")
        if self.ssh_port not in (0, running.ssh_port):
            found.append(f"SSH port {running.ssh_port}")
        if self.interfaces and self.interfaces != running.interfaces:
            found.append(" ".join(f"--interface {name}" for name in running.interfaces))
        for name, value in self.timing.items():
            if value != (actual := running.timing.get(name, 0.0)):
                found.append(f"--{name}-seconds {actual:g}")
        for kind, file in self.policies.items():
            if file.description != (other := running.policies.get(kind, "")):
                same = other.startswith(f"{file.path} (sha256 ")
                now = (
                    f", and the file has changed since ({file.description.rpartition(' (')[2]}"
                    if same
                    else ""
                )
                found.append(f"--{kind} {other}{now}" if other else f"no --{kind}")
        return found

    def command_line(self) -> str:
        """Return the command that starts a simulator with these options, as the user types it."""
        words = [
            *(("--port", str(self.port)) if self.port else ()),
            *(("--nodes", self.nodes) if self.nodes != "auto" else ()),
            *self._common_words(),
        ]
        return shlex.join(["cloudddp", "sim", "start", *words])
