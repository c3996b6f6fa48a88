"""What a node prints about its versions is matched line by line: the report is meant to be shown."""

from __future__ import annotations

import pytest

from cloudddp.cli.actions.trial import versions


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"os=ubuntu 24.04\nkernel=6.14.0-1012-aws\n", {"os": "ubuntu 24.04", "kernel": "6.14.0-1012-aws"}),
        (b"driver=\npython=Python 3.12.3", {"python": "Python 3.12.3"}),
        (b"hostname=ip-172-31-0-4\nsecret=x\n", {}),
        (b"os=\x1b[31mred\nssh=" + b"x" * 121, {}),
        (b"welcome to bash\nsystemd=systemd 257 (257.13-1)", {"systemd": "systemd 257 (257.13-1)"}),
        (b"os=\xff\xfe", {}),
        (b"programs= aws\n/me=x\n/opt/pytorch=mode 755", {"programs": "aws", "/opt/pytorch": "mode 755"}),
        (b"group docker=no\nmodules of python3=none", {"group docker": "no", "modules of python3": "none"}),
    ],
)  # fmt: skip
def test_only_known_lines_are_taken(output: bytes, expected: dict[str, str]) -> None:
    assert versions(output) == expected
