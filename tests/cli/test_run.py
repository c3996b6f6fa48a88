"""`run`: its cluster is removed whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from support.harness import TIMEOUT

# A Ctrl-C in the moment between the end of `up` and the first line after it.
INTERRUPTED = """
import os, signal, sys
from cloudddp.__main__ import main
from cloudddp.cluster import up as creating

up = creating.up

def interrupted(*arguments, **options):
    created = up(*arguments, **options)
    os.kill(os.getpid(), signal.SIGINT)
    return created

creating.up = interrupted
sys.argv = ["cloudddp", "run", "-n", "1", "--nproc-per-node", "1", "train.py"]
main()
"""


def test_interrupt_when_the_cluster_is_ready_removes_it(cli: Any) -> None:
    cli.write("train.py", "print('never runs')\n")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=cli.cwd, env=cli.env, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    left = [one for one in json.loads(cli.ok("ls", "--json")) if one["cluster"] == cli.cluster]
    assert (done.returncode, left) == (130, []), done.stderr
    assert "never runs" not in done.stdout
