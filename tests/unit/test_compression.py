"""When files are compressed on their way to the nodes."""

from __future__ import annotations

import os

import pytest

from cloudddp.agent.protocol.transfer import PLAIN, ZLIB
from cloudddp.job.transfer import MEASURED, Compression, is_worth

TEXT = b"for step in range(1000): optimizer.step()\n" * 20_000


@pytest.mark.parametrize(
    ("link", "compressor", "ratio", "worth"),
    [
        (25e6, 400e6, 0.5, True),  # 200 Mbit/s
        (25e6, 40e6, 0.3, True),  # text
        (25e6, 40e6, 0.5, False),  # something that it halves: it would take longer than it saves
        (125e6, 400e6, 0.5, True),  # 1 Gbit/s
        (125e6, 400e6, 0.9, False),
        (125e6, 40e6, 0.1, False),
        (1.0, 400e6, 1.001, False),
    ],
)
def test_worth_of_compression(link: float, compressor: float, ratio: float, worth: bool) -> None:
    assert is_worth(link, compressor, ratio) is worth


def test_nothing_is_compressed_before_the_link_was_measured() -> None:
    compression = Compression()
    compression.measure(MEASURED - 1, 1e9)
    assert compression.encode(TEXT) == (PLAIN, TEXT)
    compression.measure(1, 0.0)
    codec, data = compression.encode(TEXT)
    assert codec == ZLIB
    assert len(data) < len(TEXT) / 10


def test_fast_link_gets_plain_data() -> None:
    compression = Compression()
    compression.measure(MEASURED, 1e-9)
    assert {compression.encode(TEXT)[0] for _ in range(100)} == {PLAIN}


def test_random_data_is_not_compressed() -> None:
    compression = Compression()
    compression.measure(MEASURED, 1e9)
    data = os.urandom(1 << 18)
    assert compression.encode(data) == (PLAIN, data)


def test_link_that_becomes_slow_is_noticed() -> None:
    """A buffer on the way has taken the first bytes at once."""
    compression = Compression()
    for _ in range(16):
        compression.measure(1 << 20, 1e-6)
    for _ in range(64):
        compression.measure(1 << 20, 1.0)
        compression.encode(TEXT)
    assert compression.encode(TEXT)[0] == ZLIB
