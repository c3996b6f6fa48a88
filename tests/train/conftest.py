"""Makes `train` importable for the tests in this folder, from the checkout and from nowhere else.

It must not know anything else: how processes are started is in train_harness.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
