"""`sim`: the simulator in place of AWS."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from cloudddp.api.call import IN_SIMULATOR
from cloudddp.files import state_home
from cloudddp.simulator import control


@contextlib.contextmanager
def sim() -> Iterator[str]:
    """Start the simulator; inside the block, this process and its children use it in place of AWS. Yields the
    endpoint of its EC2.

    Its nodes are processes, which need neither root nor namespaces, and its files are in a temporary folder.
    Raises CloudDDPError where it cannot start.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="cloudddp-") as home:
        os.environ["CLOUDDDP_HOME"] = home
        try:
            found = control.start(state_home(), nodes="process")
            control.use(found)
            os.environ[IN_SIMULATOR] = "1"
            yield found.endpoint
        finally:
            control.stop(state_home())
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
