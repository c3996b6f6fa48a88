"""What `up` sends to a node as user data, for tests that launch instances by themselves."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta
from typing import Any

from support.simlab import Laptop, client_of

from cloudddp.cluster.user_data import Identity, user_data
from cloudddp.simulator import control

# A unit that does not stop.
HUNG = "[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sleep infinity\nTimeoutStopSec=infinity"


def of_instance(sim: control.Simulator, instance: str) -> bytes:
    """Return what an instance was launched with."""
    answer = client_of(sim, "ec2").describe_instance_attribute(InstanceId=instance, Attribute="userData")
    return base64.b64decode(answer["UserData"]["Value"])


def product_user_data(
    laptop: Laptop,
    *,
    expires: datetime,
    created: datetime | None = None,
    idle_minutes: float = 0.0,
    more: dict[str, list[Any]] | None = None,
) -> str:
    """Return the user data of `up`, with the keys of `laptop`; `more` is appended to its lists."""
    identity = Identity("c-0123456789", laptop.key.public, laptop.host_key.private, laptop.host_key.public)
    created = created or expires - timedelta(hours=1)
    text = user_data(identity, created, expires, idle_minutes)
    head, _, body = text.partition("\n")
    config = json.loads(body)
    for key, entries in (more or {}).items():
        config[key] = [*config[key], *entries]
    return f"{head}\n{json.dumps(config)}"
