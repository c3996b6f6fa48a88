"""Starts the command line."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        # Here, not at the top: imports may take seconds from a cold disk, and Ctrl-C during them is not an
        # error.
        from cloudddp import timings  # noqa: F401  first: it notes when the imports began
        from cloudddp.cli.entry_point import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        from cloudddp import signals

        signals.ignore()
        sys.stderr.write("cloudddp: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
