"""Python's garbage collector, which boot.py has switched off while the agent starts."""

from __future__ import annotations

import gc


def collect() -> None:
    """Collect garbage from now on, but never visit what the imports have made."""
    gc.freeze()
    gc.enable()
