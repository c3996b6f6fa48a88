"""Pulling results: a stream of files from a node, written next to its destination and moved there once it is
complete. The node lists what it has, and gets asked for what is not here (placing.py). It is not trusted: any
program of the login user decides what is sent. So only what was requested is accepted (safe_names.py), never
through a link. One that sends nothing for PACK_SECONDS is given up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cloudddp.agent import client, replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import Checkpoints
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.errors import ConnectionLost, NodeError, UsageError
from cloudddp.files import resolved, state_home
from cloudddp.job.results import incoming, safe_names
from cloudddp.job.results.incoming import identity_of, target_folder
from cloudddp.job.results.notes import LONGEST_NOTE, OTHER_FOLDER_HINT, Notes
from cloudddp.job.results.placing import Placing, Pulled
from cloudddp.job.results.receive import Progress, Receive
from cloudddp.job.results.safe_names import LOGS
from cloudddp.text import one_line

PACK_SECONDS = 120.0  # without any data from the node


def check_target(to: Path, *, hint: str = OTHER_FOLDER_HINT) -> None:
    """Raise UsageError where results cannot or must not be written to the folder `to`. Changes nothing."""
    real = resolved(to)
    existing = next(path for path in (real, *real.parents) if identity_of(path) is not None)
    if any(safe_names.guarded(part) and not part.startswith((".cloudddp", LOGS)) for part in real.parts):
        why = "it is inside git's or cloudddp's own folder"
    elif (home := identity_of(state_home())) and home in map(identity_of, (existing, *existing.parents)):
        why = f"it is inside CLOUDDDP_HOME ({state_home()}), cloudddp's own folder"
    elif not existing.is_dir():
        why = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} is not writable"
    else:
        return
    raise UsageError(f"cannot write results to {to}: {why}", hint=hint)


def pull(
    runner: Runner,
    request: PackRequest,
    *,
    node: int,
    to: Path,
    progress: Progress = lambda *_: None,
    places: Mapping[str, Path] | None = None,
    known: Checkpoints | None = None,
) -> Pulled:
    """Copy what is requested from one node into the folder `to`; files of another job to its folder in
    `places`, or to `to`. `known`: sharded checkpoints on the nodes that are pulled from.

    Files are moved to their places once all have arrived, so that a broken transfer leaves no partial
    snapshot under its final name; the next pull from that node continues it. Raises UsageError for a name or
    a target that is not allowed; NodeError, with nothing moved, if the connection breaks or the node sends
    what was not requested; CloudDDPError where `to` cannot be written.
    """
    roots = safe_names.requested(request.paths)
    check_target(to)
    request = replace(request, paths=tuple("/".join((".", *root)) for root in roots))
    folder = incoming.name_of(runner.host_key(node), request.job)
    with target_folder(to) as target:
        try:
            with incoming.incoming(target, folder) as arrived:
                notes = Notes(of_logs=bool(request.job))
                placing = Placing(arrived, target, roots, notes, node, places or {})
                with contextlib.closing(Receive(placing, progress)) as receive:
                    take, answer = receive.feed, receive.answer
                    result = client.run_step(
                        runner, node, request, timeout=PACK_SECONDS, body=answer, on_stdout=take
                    )
                    if result.exit_code:
                        hint = "" if result.stderr else "repeat `cloudddp pull`, which continues"
                        raise NodeError(f"node {node}: {replies.failure_text(result)}", hint=hint)
                    receive.done()
                    return placing.move(known or Checkpoints({}))
        except ProtocolError as error:
            raise NodeError(
                f"node {node} sent results that cloudddp refuses: {one_line(str(error), LONGEST_NOTE)}; "
                "nothing was kept",
                hint=replies.replaced_hint(node),
            ) from None
        except ConnectionLost as error:
            if not target.kind(folder):
                raise
            raise ConnectionLost(
                error.reason,
                "; what had arrived is kept",
                hint=f"repeat `cloudddp pull`, which continues; {error.hint}",
            ) from None
