"""The parameters that name the simulator's images, read by several requests at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cloudddp.simulator.ec2 import images
from cloudddp.simulator.ec2.speed import fast_imports


def test_request_that_comes_while_parameters_are_added_finds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with fast_imports():  # not at the top: the collection of tests would parse the regions three times
        from moto.ssm import models
    found = models.ParameterDict("123456789012", "us-east-1")
    last = images.IMAGES[-1].parameter
    seen: list[bool] = []

    def read() -> None:
        images._load_parameters(lambda *_: None, found, last)
        seen.append(bool(found[last]))

    other = threading.Thread(target=read)

    original: Any = models.Parameter

    def slow(**words: Any) -> Any:
        if other.ident is None:
            other.start()
            time.sleep(0.2)  # for the other one to look
        return original(**words)

    monkeypatch.setattr(models, "Parameter", slow)
    images._load_parameters(lambda *_: None, found, images.IMAGES[0].parameter)
    other.join()
    assert seen == [True]
