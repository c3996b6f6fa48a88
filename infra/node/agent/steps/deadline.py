"""`deadline`: move the deadline of this node, and return when its timer ends it.

The files are root's: those that user data has written (cluster/user_data.py). Each is replaced atomically,
and the check of later boots before the timer, whose own calendar catches up with a time that has passed.
"""

from __future__ import annotations

import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

from agent.node import deadline, store
from cloudddp.agent.protocol.machine import DeadlineReply, DeadlineRequest

REQUEST = DeadlineRequest
SECONDS = 40.0
SCRIPT = r"""
set -eu
replace() {
    sed "$2" "$1" > "$1.new"
    grep -q "$3" "$1.new" || { echo "$1 is not as cloudddp has written it" >&2; exit 1; }
    chmod --reference="$1" "$1.new"
    sync "$1.new"
    mv -f "$1.new" "$1"
}
case $(systemctl show cloudddp-deadline.service -p ActiveState) in
*=activ*) echo "this node is already powering off" >&2; exit 1 ;;
esac
replace /var/lib/cloud/scripts/per-boot/cloudddp-deadline "s/ -lt [0-9]* / -lt $2 /" " -lt $2 "
replace /etc/systemd/system/cloudddp-deadline.timer \
    "s/^OnCalendar=.*/OnCalendar=$1/; s/^OnBootSec=.*/OnBootSec=$3/" "^OnCalendar=$1\$"
systemctl daemon-reload
systemctl restart cloudddp-deadline.timer || systemctl start cloudddp-deadline.timer
"""


def step(request: DeadlineRequest) -> DeadlineReply:
    if request.ends is not None:
        moment = datetime.fromtimestamp(request.ends, timezone.utc)
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        words = (f"{moment:%Y-%m-%d %H:%M:%S} UTC", f"{request.ends:.0f}", f"{uptime + request.left + 1:.0f}")
        argv = ["sudo", "-n", "sh", "-s", "--", *words]
        try:
            done = subprocess.run(
                argv, input=SCRIPT.encode(), capture_output=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"cannot move its deadline: {error}") from None
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()
            raise SystemExit(f"cannot move its deadline: {why or 'sudo failed'}")
        store.create_root()
        store.write(deadline.MOVED, DeadlineReply(time.time() + request.left))
    return DeadlineReply(deadline.elapses())
