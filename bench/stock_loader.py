"""`cloudddp` with botocore's own loader of service models: the other side of `python -m bench models`."""

from __future__ import annotations

import botocore.session

from cloudddp.__main__ import main
from cloudddp.aws import client

client.model_loader = lambda session: botocore.session.Session().get_component("data_loader")  # noqa: ARG005

if __name__ == "__main__":
    main()
