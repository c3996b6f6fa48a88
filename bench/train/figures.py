"""Plots as files. matplotlib is imported when a plot is drawn, and may be missing otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AVAILABLE = importlib.util.find_spec("matplotlib") is not None
INSTALL = "pip install matplotlib"


@contextmanager
def figure(path: Path, **settings: Any) -> Iterator[Figure]:
    """Yield a figure without a display, and write it to `path` (.svg, .png or .pdf).

    The same data gives the same bytes with one version of matplotlib: no date, and ids that do not vary. The
    text of an SVG stays text. Raises `ValueError` where matplotlib does not know the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "cloudddp", "svg.fonttype": "none"}):
        drawn = Figure(layout="constrained", **settings)
        yield drawn
        drawn.savefig(path, metadata=undated.get(path.suffix))
