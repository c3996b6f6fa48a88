"""A run of tests that is killed leaves no simulators and no other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support import simulators
from support.harness import ROOT, TIMEOUT, clean_environment, wait_for


def test_simulators_end_with_the_test_process(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from support import simulators\nfrom cloudddp.simulator import control\n"
        "base = Path(sys.argv[1])\n"
        "watcher = simulators.stop_after_this_process(base)\n"
        f"control.start(base / 'home', nodes='process', timeout={TIMEOUT})\n"
        "print('started', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), str(ROOT)])),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert simulators.running(tmp_path) == [tmp_path / "home"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not simulators.running(tmp_path), "the simulator has ended")
