"""Runs train/main.py with another grace period of the peer monitor: `short_grace.py SECONDS FLAGS...`."""

from __future__ import annotations

import sys

from train.distributed import peer_monitor
from train.main import main
from train.process_exit import exit_process

peer_monitor.GRACE = float(sys.argv[1])
exit_process(main(sys.argv[2:]))
