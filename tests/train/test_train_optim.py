"""The learning rate is a function of the step, and the update rules are PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from train import optim, parallel
from train.config import make
from train.dist import Place, Ranks
from train.errors import UsageError

pytestmark = pytest.mark.torch
STEPS = 10  # per epoch


def rates(**flags: Any) -> list[float]:
    config = make(dataset="synthetic", lr=0.4, epochs=4, **flags)
    lr = optim.schedule(config, STEPS)
    return [lr(step) for step in range(4 * STEPS)]


def test_without_a_scheduler_the_rate_is_the_one_given() -> None:
    assert set(rates(scheduler="none")) == {0.4}


def test_the_step_scheduler_divides_by_ten_at_the_epochs_named() -> None:
    found = rates(scheduler="step", lr_epochs=2)
    assert found[:20] == [0.4] * 20
    assert found[20:] == pytest.approx([0.04] * 20)


def test_the_warm_up_rises_in_equal_steps_and_cosine_falls_to_0_from_its_end() -> None:
    found = rates(scheduler="cosine", warmup_epochs=0.5)
    assert found[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
    assert found[5] == pytest.approx(0.4)
    assert found[5:] == sorted(found[5:], reverse=True)
    assert 0 < found[-1] < 0.001
    middle = 5 + 35 // 2
    assert (found[middle] + found[middle + 1]) / 2 == pytest.approx(0.2, abs=1e-9)


def test_the_rate_grows_with_the_global_batch_that_it_was_not_meant_for() -> None:
    assert set(rates(scheduler="none", batch_size=512, lr_batch=128)) == {1.6}


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
        ("adadelta", torch.optim.Adadelta, {}),
        ("adamw", torch.optim.AdamW, {}),
    ],
)
def test_each_update_rule_is_pytorchs_with_the_rate_and_the_decay_given(
    name: str, kind: type[torch.optim.Optimizer], own: dict[str, float]
) -> None:
    given = {"lr": 0.3, "weight_decay": 0.02, **own}
    made = optim.make(make(dataset="toy", optimizer=name, **given), [torch.nn.Parameter(torch.zeros(1))])
    assert type(made) is kind
    assert {key: made.param_groups[0][key] for key in given} == given


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_fused_update_is_the_same_update(name: str) -> None:
    results = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
        optimizer = optim.make(make(dataset="synthetic", optimizer=name, lr=0.1, fused=fused), [weight])
        for step in range(3):
            weight.grad = torch.cos(weight.detach() + step)
            optimizer.step()
        results.append(weight.detach())
    assert (results[0] - results[1]).abs().max().item() < 1e-12
    assert optimizer.param_groups[0]["fused"] is True


def test_a_fused_update_that_pytorch_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="choose sgd or adamw"):
        optim.make(make(dataset="mnist", fused=True), [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("other", ["adamw", "adadelta"])
def test_a_resumed_run_keeps_what_its_own_flags_say_of_the_optimizer_but_not_the_state_of_another(
    other: str,
) -> None:
    def held(**flags: Any) -> tuple[parallel.Replicas, torch.optim.Optimizer]:
        config = make(dataset="toy", **flags)
        ranks = Ranks(place=Place(), device=torch.device("cpu"))
        subject = parallel.build(config, ranks, torch.nn.Linear(3, 1), shape=(3,))
        made = optim.make(config, subject.module.parameters())
        subject.model(torch.ones(1, 3)).sum().backward()
        made.step()
        return subject, made

    before, optimizer = held(weight_decay=0.1)
    state = before.state(optimizer)
    after, resumed = held(momentum=0.5, weight_decay=0.2, fused=True)
    after.load(resumed, state)
    group = resumed.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["fused"]) == (0.5, 0.2, True)
    for old, new in zip(before.module.parameters(), after.module.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(optimizer.state[old]["momentum_buffer"], resumed.state[new]["momentum_buffer"])

    unlike, wrong = held(optimizer=other)
    with pytest.raises(ValueError, match="its optimizer has dampening"):
        unlike.load(wrong, state)
