"""The command fi_info of libfabric: lists the instance's EFA devices. Nothing can send through them."""

from __future__ import annotations

import sys

from . import on_node

_NO_DATA = 61  # ENODATA, of which fi_info makes its exit status
_ENDPOINTS = (("rdm", "FI_EP_RDM", "FI_PROTO_EFA"), ("dgrm", "FI_EP_DGRAM", "FI_PROTO_EFA"))


def main(arguments: list[str]) -> int:
    """Print what `fi_info -p efa` prints for the EFA interfaces of the instance. Returns its exit code."""
    on_node.require()
    return answer(int(on_node.facts().get("efa_devices", 0)), arguments)


def answer(devices: int, arguments: list[str]) -> int:
    """Print two endpoints for each device, as libfabric's provider for EFA has them; `-t TYPE` selects one of them."""
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) % 2 or not pairs.keys() <= {"-p", "-t"}:
        print(f"fi_info (simulated): unsupported: {' '.join(arguments)}", file=sys.stderr)
        return 2
    found = [one for one in _ENDPOINTS if pairs.get("-t", one[1]) == one[1]]
    if not devices or not found or pairs.get("-p", "efa") != "efa":
        print("fi_getinfo: -61 (No data available)")
        return _NO_DATA
    for index in range(devices):
        for suffix, endpoint, protocol in found:
            print(
                f"provider: efa\n    fabric: efa\n    domain: rdmap{16 + index}s27-{suffix}\n    version: 0.0\n"
                f"    type: {endpoint}\n    protocol: {protocol}"
            )
    return 0
