"""Pulling results: a stream of files from a node, written next to its destination and moved there once it is
complete.

The node lists what it has, and gets asked for what is not here (local_files.py). So files that did not change
are not sent again, and a transfer that broke continues.

A node is not trusted: any program that runs there as the login user decides what is sent. So only what was
requested is accepted (safe_names.py), never through a link (unpack.py). A file that cannot be written is left
out and reported.

A node that sends nothing for PACK_SECONDS, or no results for STALLED seconds, is given up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from cloudddp.agent import client, replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import Checkpoints
from cloudddp.agent.protocol.file_steps import PackRequest, Selection
from cloudddp.agent.protocol.results import EVIDENCE, LeftFile
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import Message, NodeError, UsageError, q
from cloudddp.files import Folder, resolved, state_home
from cloudddp.job.results import incoming, safe_names
from cloudddp.job.results.incoming import Incoming, identity_of
from cloudddp.job.results.receive import Progress, Receive
from cloudddp.job.results.safe_names import LOGS, Parts
from cloudddp.job.results.unpack import (
    CHANGED_NOTE,
    LONGEST_NOTE,
    MISSING_NOTE,
    OTHER_FOLDER_HINT,
    Notes,
    Refused,
    Truncated,
    cannot_write,
)
from cloudddp.text import one_line

PACK_SECONDS = 120.0  # without any data from the node
STALLED = 1800.0  # seconds in which it only says that it works: it reads files, of which some may be large


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull. `notes` list what was missing or left out, and why. `unchanged` files are in the
    target already and not counted in `files`. `left` are results that were not copied; None: there are more
    than a node remembers. `incomplete`: folders of checkpoints, which are in safe_names.INCOMPLETE. `others`:
    how many of the files other jobs wrote, by job."""

    files: int
    size: int
    notes: tuple[str, ...]
    unchanged: int = 0
    left: tuple[LeftFile, ...] | None = ()
    incomplete: tuple[str, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def found(self) -> int:
        """The number of files, with those that are unchanged."""
        return self.files + self.unchanged


def no_progress(_: object) -> None:
    """Show nothing."""


def pull_logs(
    runner: Runner, job_id: str, *, node: int, to: Path, progress: Progress = no_progress
) -> Pulled:
    """Copy a job's logs, verdict and dumps from one node into `to`/cloudddp-logs/nodeN. What does not exist
    is no note, and that a log grows is none. Raises as `Pull`."""
    place = to / LOGS / f"node{node}"
    pulled = Pull(runner, EVIDENCE, node=node, to=place, progress=progress, job=job_id).run()
    return replace(
        pulled, notes=tuple(one for one in pulled.notes if not one.startswith((MISSING_NOTE, CHANGED_NOTE)))
    )


def check_target(to: Path, *, hint: str = OTHER_FOLDER_HINT) -> None:
    """Raise UsageError where results cannot or must not be written to the folder `to`. Changes nothing."""
    real = resolved(to)
    existing = next(path for path in (real, *real.parents) if identity_of(path) is not None)
    if any(safe_names.guarded(part) and not part.startswith((".cloudddp", LOGS)) for part in real.parts):
        why = "it is inside git's or cloudddp's own folder"
    elif _is_state(existing):
        why = f"it is inside CLOUDDDP_HOME ({state_home()}), cloudddp's own folder"
    elif not existing.is_dir():
        why = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} is not writable"
    else:
        return
    raise UsageError(f"cannot write results to {to}: {why}", hint=hint)


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
    home = identity_of(state_home())
    return home is not None and any(identity_of(path) == home for path in (folder, *folder.parents))


# -- the target --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def target_folder(to: Path) -> Iterator[Folder]:
    """Yield the folder `to`, open. Folders that were created for it and are empty in the end are removed
    again."""
    missing = [path for path in (to, *to.parents) if identity_of(path) is None]
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


# -- from the node -----------------------------------------------------------------------------------------


@dataclass
class Pull:
    """Copies files and folders of the project on one node into the folder `to`.
    `everything`: also files behind links that no job wrote. `selection`: only these, below the names.
    `results_of`: the job whose results are in `to`; files of another job go to its folder in `places`, or
    to `to` where it has none there.
    `known`: sharded checkpoints on the nodes that are pulled from. `job`: from that job's own folder.

    Files are written to a folder inside `to` and moved once all have arrived, so that a broken transfer never
    leaves a partial snapshot under its final name; the next pull from that node continues it. Raises
    UsageError for a name or a target that is not allowed; NodeError, with nothing moved, if the connection
    breaks or the node sends what was not requested; CloudDDPError where `to` cannot be written.
    """

    runner: Runner
    names: Sequence[str]
    _: KW_ONLY
    node: int
    to: Path
    progress: Progress = no_progress
    job: str = ""
    everything: bool = False
    selection: Selection | None = None
    results_of: str = ""
    places: Mapping[str, Path] = field(default_factory=dict)
    known: Checkpoints = field(default_factory=lambda: Checkpoints({}))
    notes: Notes = field(init=False)

    def __post_init__(self) -> None:
        self.roots = check_names(self.names)
        check_target(self.to)

    def run(self) -> Pulled:
        """Pull, once. May be called again."""
        self.notes = Notes()
        name = incoming.name_of(self.runner.host_key(self.node), self.job)
        with contextlib.ExitStack() as opened, target_folder(self.to) as target:
            try:
                with incoming.incoming(target, name) as arrived:
                    receive = self._receive(arrived, target)
                    wrote = {path: job for path, job in receive.others.items() if job in self.places}
                    folders = {
                        job: opened.enter_context(target_folder(self.places[job]))
                        for job in set(wrote.values())
                    }
                    elsewhere = {path: (job, folders[job]) for path, job in wrote.items()}
                    moved = incoming.move_results(
                        arrived.files, target, self.notes, self.known, node=self.node, elsewhere=elsewhere
                    )
            except Refused as error:
                raise self._refused(error, kept=target.kind(name) != 0) from None
            except NodeError as error:
                if not error.reason or not target.kind(name):
                    raise
                raise NodeError(
                    f"{error.reason}; what had arrived is kept",
                    hint=f"repeat `cloudddp pull`, which continues; {error.hint}",
                    reason=error.reason,
                ) from None
        return Pulled(
            moved.files,
            moved.size,
            self.notes.lines(),
            receive.unchanged + moved.unchanged,
            self.notes.left,
            tuple(moved.incomplete),
            +moved.others,
        )

    def _receive(self, arrived: Incoming, target: Folder) -> Receive:
        """Receive what was requested from the node."""
        node = self.node
        request = PackRequest(
            PROJECT,
            tuple("/".join((".", *root)) for root in self.roots),
            self.job,
            self.everything,
            self.selection,
            self.results_of,
        )
        with Receive(arrived, target, self.roots, self.notes, node=node, progress=self.progress) as receive:
            result = client.run_step(
                self.runner,
                node,
                request,
                timeout=PACK_SECONDS,
                body=receive.answer,
                on_stdout=functools.partial(self._take, receive, receive.feed),
                on_stderr=functools.partial(self._take, receive, receive.feed_notes),
                is_last=True,
            )
            if result.exit_code:
                raise NodeError(f"node {node}: {self.notes.last() or replies.failure_text(result)}")
            receive.close()
        return receive

    def _take(self, receive: Receive, feed: Callable[[bytes], None], data: bytes) -> None:
        """Pass on what the node has sent. Raises NodeError after a time without results."""
        feed(data)
        if time.monotonic() - receive.progressed >= STALLED:
            reason = f"node {self.node}: it made no progress while it sent results"
            look = Message(f"is the node overloaded, or its disk? Look with `cloudddp ssh {q(self.node)}`")
            raise NodeError(reason, hint=look, reason=reason)

    def _refused(self, error: Refused, *, kept: bool) -> NodeError:
        why = one_line(str(error), LONGEST_NOTE)
        if isinstance(error, Truncated):
            after = "what had arrived is kept" if kept else "nothing was kept"
            return NodeError(
                f"node {self.node}: the results are incomplete: {why}; {after}",
                hint="repeat `cloudddp pull`",
            )
        return NodeError(
            f"node {self.node} sent results that cloudddp refuses: {why}; nothing was kept",
            hint=replies.replaced_hint(self.node),
        )
