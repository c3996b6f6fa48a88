"""Pulling results: a tar stream from a node, unpacked next to its destination and moved there once it is complete.

A node is not trusted: any program that runs there as the login user decides what is sent. So only what was
requested is accepted, by names that mean the same on every file system (safe_names.py), through open folders and never
through a link (unpack.py). A stream that no agent sends is refused as a whole; a single file that cannot be written
is left out and reported.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloudddp import local_state
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.files import PackRequest
from cloudddp.agent.protocol.results import EVIDENCE
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import Command, NodeError, UsageError
from cloudddp.job.results import safe_names, untar
from cloudddp.job.results.errors import OTHER_FOLDER_HINT, cannot_write
from cloudddp.job.results.notes import LONGEST, MISSING, Notes
from cloudddp.job.results.place import Move, identity
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import Unpack
from cloudddp.safe_files import Folder, resolved
from cloudddp.text import one_line

PACK_SECONDS = 120.0  # without any data from the node


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull. `older` files were last written before the job began; `notes` list what was missing or
    left out, and why."""

    files: int
    size: int
    older: int
    notes: tuple[str, ...]


LOGS = "logs"  # the folder for it, in that of a job's results


def pull(runner: Runner, names: Sequence[str], *, node: int, to: Path, since: float | None = None) -> Pulled:
    """Copy files and folders of the project on one node into the folder `to`. `since`: when the job began.

    Files are written to a temporary folder inside it and moved once all have arrived, so that a broken transfer never
    leaves a partial snapshot under its final name. Raises UsageError for a name or a target that is not allowed;
    NodeError, with nothing moved, if the node sends what was not requested; CloudDDPError where `to` cannot be written.
    """
    return _pull(runner, names, node, to, since=since)


def pull_logs(runner: Runner, job_id: str, *, node: int, to: Path) -> Pulled:
    """Copy a job's logs, verdict and dumps from one node into `to`/logs/nodeN. What does not exist is no note. Raises as
    `pull`."""
    pulled = _pull(runner, EVIDENCE, node, to / LOGS / f"node{node}", job=job_id)
    return replace(pulled, notes=tuple(one for one in pulled.notes if not one.startswith(MISSING)))


def _pull(
    runner: Runner, names: Sequence[str], node: int, to: Path, *, since: float | None = None, job: str = ""
) -> Pulled:
    roots = check_names(names)
    check_target(to)
    notes = Notes()
    with target_folder(to) as target, incoming(target) as arrived:
        _receive(runner, roots, node, arrived, notes, job)
        moved = Move(notes, since=int(since or 0))
        try:
            moved.contents(arrived, target)
        except OSError as error:
            raise cannot_write(to, error) from None
    return Pulled(moved.files, moved.size, moved.older, notes.lines())


def check_target(to: Path, *, hint: str = OTHER_FOLDER_HINT) -> None:
    """Raise UsageError where results cannot or must not be written to the folder `to`. Changes nothing."""
    real = resolved(to)
    if any(safe_names.guarded(part) and not part.startswith(".cloudddp") for part in real.parts):
        raise UsageError(
            f"cannot write results to {to}: it is inside git's or cloudddp's own folder", hint=hint
        )
    existing = next(path for path in (real, *real.parents) if _exists(path))
    if _is_state(existing):
        raise UsageError(
            f"cannot write results to {to}: it is inside CLOUDDDP_HOME ({local_state.home()}), cloudddp's own folder",
            hint=hint,
        )
    if not existing.is_dir():
        raise UsageError(f"cannot write results to {to}: {existing} is not a folder", hint=hint)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write results to {to}: {existing} is not writable", hint=hint)


def check_names(names: Sequence[str]) -> tuple[Parts, ...]:
    """Return the paths that a user requested. Raises UsageError for one that leads out of the project."""
    try:
        return safe_names.requested(names)
    except ValueError as error:
        raise UsageError(
            f"{str(error)!r} is not a path inside the project",
            hint="give a path relative to the project's folder",
        ) from None


def _is_state(folder: Path) -> bool:
    """Return whether a folder is CLOUDDDP_HOME or inside it, by whatever name."""
    home = identity(local_state.home())
    return home is not None and any(identity(path) == home for path in (folder, *folder.parents))


def _exists(path: Path) -> bool:
    """Return whether a path leads to something that this user can reach."""
    return identity(path) is not None


# -- the target --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def target_folder(to: Path) -> Iterator[Folder]:
    """Yield the folder `to`, open. Folders that were created for it and are empty in the end are removed again."""
    missing = [path for path in (to, *to.parents) if not _exists(path)]
    try:
        to.mkdir(parents=True, exist_ok=True)
        target = Folder.at(to)
    except OSError as error:
        raise cannot_write(to, error) from None
    try:
        with target:
            yield target
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


@contextlib.contextmanager
def incoming(target: Folder) -> Iterator[Folder]:
    """Yield a new folder in the target; remove it, with what is left in it, in the end."""
    name = f".cloudddp-incoming-{secrets.token_hex(6)}"
    try:
        os.mkdir(name, 0o700, dir_fd=target.descriptor)
        folder = target.enter(name)
    except OSError as error:
        raise cannot_write(target.path, error) from None
    try:
        with folder:
            yield folder
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=target.descriptor)


# -- from the node -----------------------------------------------------------------------------------------


def _receive(
    runner: Runner, roots: Sequence[Parts], node: int, folder: Folder, notes: Notes, job: str
) -> None:
    """Receive what was requested from the node, into an empty folder."""
    request = PackRequest(PROJECT, tuple("/".join((".", *root)) for root in roots), job)
    try:
        with Unpack(folder, roots, notes, node) as unpack:
            reader = untar.Reader(unpack)
            result = client.run_step(
                runner, node, request,
                timeout=PACK_SECONDS, on_stdout=reader.feed, on_stderr=notes.feed,
            )  # fmt: skip
            if result.exit_code:
                raise NodeError(f"node {node}: {notes.last() or client.failure_text(result)}")
            reader.close()
    except untar.Truncated as error:
        raise NodeError(
            f"node {node}: the results are incomplete: {one_line(str(error), LONGEST)}",
            hint=("nothing was kept; repeat ", Command("pull")),
        ) from None
    except untar.Refused as error:
        raise NodeError(
            f"node {node} sent results that cloudddp refuses: {one_line(str(error), LONGEST)}; "
            "nothing was kept",
            hint=(
                "a program on that node has replaced the agent or writes into its output; ",
                "look with ",
                Command("ssh", str(node)),
                ", or end the cluster with ",
                Command("down"),
            ),
        ) from None
    except OSError as error:
        raise cannot_write(folder.path.parent, error) from None
