"""Makes `train` importable for the tests in this folder. None leaves a process behind."""

from __future__ import annotations

import sys

from support.training import launch
from support.training.fixtures import no_process_is_left  # noqa: F401

if str(launch.ROOT) not in sys.path:
    sys.path.insert(0, str(launch.ROOT))
