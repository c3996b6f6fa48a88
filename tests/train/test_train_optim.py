"""The learning rate is a function of the step, and the optimizers are PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training.small_trainer import single_process

from train.config import make
from train.errors import UsageError
from train.optimizer import make_optimizer, make_schedule
from train.parallel import select
from train.parallel.ddp import DDPStrategy
from train.task import regression

pytestmark = pytest.mark.torch
STEPS = 10  # per epoch


def module_of(*weights: torch.Tensor) -> torch.nn.ParameterList:
    return torch.nn.ParameterList(map(torch.nn.Parameter, weights))


def rates(**flags: Any) -> list[float]:
    config = make(dataset="synthetic", lr=0.4, epochs=4, **flags)
    lr = make_schedule(config, STEPS, 4 * STEPS)
    return [lr(step) for step in range(4 * STEPS)]


def test_step_schedule_divides_by_ten() -> None:
    lr = rates(scheduler="step", lr_epochs=2)
    assert lr[:20] == [0.4] * 20
    assert lr[20:] == pytest.approx([0.04] * 20)


def test_warmup_is_linear_and_cosine_decays_to_0() -> None:
    lr = rates(scheduler="cosine", warmup_epochs=0.5)
    assert lr[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
    assert lr[5] == pytest.approx(0.4)
    assert lr[5:] == sorted(lr[5:], reverse=True)
    assert 0 < lr[-1] < 0.001
    middle = 5 + 35 // 2
    assert (lr[middle] + lr[middle + 1]) / 2 == pytest.approx(0.2, abs=1e-9)


def test_cosine_decays_to_the_smallest_rate_and_ends_with_the_last_step() -> None:
    lr = make_schedule(make(dataset="synthetic", lr=0.4, scheduler="cosine", min_lr=0.1), STEPS, 15)
    assert lr(0) == pytest.approx(0.4)
    assert lr(15) == pytest.approx(0.1)
    assert lr(20) == pytest.approx(0.1)


def test_biases_and_norms_have_no_decay_if_asked() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    config = make(dataset="toy", weight_decay=0.1, decay_all=False)
    groups = make_optimizer(config, module).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (3, 0.0)]
    assert groups[0]["params"][0] is module[0].weight


def test_lr_scales_with_the_global_batch_size() -> None:
    assert set(rates(scheduler="none", batch_size=512, lr_batch=128)) == {1.6}


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
        ("adadelta", torch.optim.Adadelta, {}),
        ("adamw", torch.optim.AdamW, {}),
    ],
)
def test_optimizer_is_torchs_with_the_given_settings(
    name: str, kind: type[torch.optim.Optimizer], own: dict[str, float]
) -> None:
    given = {"lr": 0.3, "weight_decay": 0.02, **own}
    config = make(dataset="toy", optimizer=name, **given)
    optimizer = make_optimizer(config, module_of(torch.zeros(1)))
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in given} == given


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_update_equals_the_plain_one(name: str) -> None:
    results = []
    for fused in (False, True):
        module = module_of(torch.linspace(-1, 1, 50, dtype=torch.float64))
        weight = module[0]
        config = make(dataset="synthetic", optimizer=name, lr=0.1, fused=fused)
        optimizer = make_optimizer(config, module)
        for step in range(3):
            weight.grad = torch.cos(weight.detach() + step)
            optimizer.step()
        results.append(weight.detach())
    assert (results[0] - results[1]).abs().max().item() < 1e-12
    assert optimizer.param_groups[0]["fused"] is True


def test_fused_adadelta_is_refused() -> None:
    with pytest.raises(UsageError, match="use --optimizer sgd or adamw"):
        make_optimizer(make(dataset="mnist", fused=True), module_of(torch.zeros(1)))


@pytest.mark.parametrize("other", ["adamw", "adadelta"])
def test_resumed_run_keeps_its_optimizer_flags_and_refuses_another_optimizer(other: str) -> None:
    def trained(**flags: Any) -> tuple[DDPStrategy, torch.optim.Optimizer]:
        config = make(dataset="toy", **flags)
        layer, batch = torch.nn.Linear(3, 1), (torch.zeros(2, 3), torch.zeros(2, 1))
        strategy = select.build(config, single_process(), layer, regression(), lambda: batch)
        optimizer = make_optimizer(config, strategy.module)
        strategy.model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return strategy, optimizer

    before, optimizer = trained(weight_decay=0.1)
    state = before.state(optimizer)
    after, resumed = trained(momentum=0.5, weight_decay=0.2, fused=True)
    after.load(resumed, state)
    group = resumed.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["fused"]) == (0.5, 0.2, True)
    for old, new in zip(before.module.parameters(), after.module.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(optimizer.state[old]["momentum_buffer"], resumed.state[new]["momentum_buffer"])

    unlike, wrong = trained(optimizer=other)
    with pytest.raises(ValueError, match="its optimizer has dampening"):
        unlike.load(wrong, state)
