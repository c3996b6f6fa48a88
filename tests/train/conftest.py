"""Makes `train` importable for the tests in this folder, from the checkout and from nowhere else, and holds the one
zygote that they share.

It must not know anything else: how processes are started is in train_harness.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import train_harness

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[train_harness.Zygote]:
    """Starts ranks quickly."""
    started = train_harness.Zygote(tmp_path_factory.mktemp("zygote"))
    yield started
    started.close()
