"""When this node is about to end: notices of EC2 in the instance metadata, and the cluster's deadline.

A spot interruption is announced two minutes before (`spot/instance-action`), and the ranks are told to save
at once; a scheduled maintenance (`events/maintenance/scheduled`) days before, so they are told `save` seconds
before it, as before the deadline. A rebalance recommendation is no notice: most of those instances run on.
AWS recommends to look every 5 s:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Optional

from agent.jobs import poweroff
from agent.node import imds
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE
from cloudddp.agent.protocol.start import Deadline

INTERVAL = 5.0  # seconds between two looks
FIRST = 0.5  # seconds until the first one
MARGIN = 10.0  # seconds before the end of a node at which ranks that still save are killed
MAX_WORD = 60  # characters of a word of the service
# What AWS does to the node, by a part of the event's code.
VERBS = {"reboot": "reboots", "stop": "stops", "retire": "retires"}


@frozen
class Notice:
    """This node ends at `ends`, by the monotonic clock; the ranks have to save `early` seconds before."""

    ends: float
    early: float
    detail: str
    by_aws: bool = False

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.ends - self.early

    def failure(self, node: int) -> Failure:
        """Return it as the failure of a job, on this node."""
        return Failure(node, Cause.NOTICE, exit_code=PREEMPTED_EXIT_CODE, detail=self.detail)

    def grace(self, stop_grace: float) -> float:
        """Return for how many seconds the ranks may save: as long as the notice allows."""
        left = self.ends - time.monotonic()
        return max(left - MARGIN, min(stop_grace, left - 1.0), 0.0)


class NoticeWatch:
    """Looks for notices in a thread."""

    def __init__(self, given: Optional[Deadline], save: float) -> None:
        self._given: list[Notice] = []  # by AWS
        self._save = save
        self._announced = ""  # the detail of the deadline that was announced last
        self._requested = given
        self._began = time.monotonic()
        address = imds.address()
        if address:
            self._metadata = imds.Metadata(address)
            threading.Thread(target=self._look, daemon=True).start()

    def due(self) -> Optional[Notice]:
        """Return the notice that the ranks have to be told of now, or None."""
        return next((one for one in (*self._given, *self._at_deadline()) if one.is_due), None)

    def _at_deadline(self) -> list[Notice]:
        """Return the notice of the deadline, which `extend` may move while the job runs."""
        ends, at = poweroff.deadline(self._requested, self._began)
        if ends == math.inf:
            return []
        # A job that begins shortly before the deadline may use half of the time that is left.
        early = min(self._save, (ends - self._began) / 2)
        return [Notice(ends, early, f"the cluster's deadline is at {at}")]

    def announcement(self, early: float) -> Optional[Notice]:
        """Return the deadline when it is at most `early` seconds away: once, and again where it was moved."""
        found = next((one for one in self._at_deadline() if replace(one, early=early).is_due), None)
        if found is None or found.detail == self._announced:
            return None
        self._announced = found.detail
        return found

    def _look(self) -> None:
        time.sleep(FIRST)
        while True:
            try:
                given = (_interruption(self._metadata), _maintenance(self._metadata, self._save))
                self._given = [one for one in given if one is not None]
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
                pass  # the service is busy, or answers something else: the next look may succeed
            time.sleep(INTERVAL)


def _interruption(metadata: imds.Metadata) -> Optional[Notice]:
    """Return the notice of a spot instance. Raises OSError, HTTPException, ValueError, LookupError,
    TypeError."""
    text, now = metadata.get("spot/instance-action")
    if not text:
        return None
    found = json.loads(text)
    ends = datetime.strptime(found["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return _notice(ends, now, float("inf"), "ends", "spot notice")


def _maintenance(metadata: imds.Metadata, save: float) -> Optional[Notice]:
    """Return the notice of the next scheduled maintenance. Raises as `_interruption`."""
    text, now = metadata.get("events/maintenance/scheduled")
    events = [event for event in json.loads(text or "[]") if event.get("State") == "active"]
    listed = [(parsedate_to_datetime(event["NotBefore"]), str(event["Code"])[:MAX_WORD]) for event in events]
    coming = [(begins, code) for begins, code in listed if begins > now]
    if not coming:
        return None
    begins, code = min(coming)
    verb = next((found for word, found in VERBS.items() if word in code), "interrupts")
    return _notice(begins, now, save, verb, f"scheduled maintenance: {code}")


def _notice(ends: datetime, now: datetime, early: float, verb: str, why: str) -> Notice:
    left = max((ends - now).total_seconds(), 0.0)
    detail = f"AWS {verb} it at {ends:%H:%M:%S} UTC ({why})"
    return Notice(time.monotonic() + left, early, detail, by_aws=True)
