"""`sim`: the simulator in place of AWS."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cloudddp.api.call import IN_SIMULATOR
from cloudddp.files import state_home
from cloudddp.simulator import control


@contextlib.contextmanager
def sim(home: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Start the simulator; inside the block, this process and its children use it in place of AWS. Yields the
    endpoint of its EC2.

    `home` has its files and those of cloudddp; by default a temporary folder, removed at the end. Its nodes
    are processes, which need neither root nor namespaces. Raises CloudDDPError where it cannot start.
    """
    before = dict(os.environ)
    with contextlib.ExitStack() as left:
        if home is None:
            home = left.enter_context(tempfile.TemporaryDirectory(prefix="cloudddp-"))
        os.environ["CLOUDDDP_HOME"] = str(Path(home).absolute())
        left.callback(_restore, before)
        left.callback(control.stop, state_home())
        found = control.start(state_home(), nodes="process")
        control.enter(found)
        for name in control.HIDDEN:
            os.environ.pop(name, None)
        os.environ.update(control.environment(found) | {IN_SIMULATOR: "1"})
        yield found.endpoint


def _restore(before: Mapping[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
