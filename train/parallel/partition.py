"""Splits a sequence of layers into pipeline stages.

A stage is an `nn.Sequential` of the model's own layers under their own names, so the parameters of all stages
together have the names of the whole model, and snapshots fit either. Independent of devices and ranks.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from train.errors import UsageError


def partition(module: nn.Module, *, count: int, cuts: str = "") -> list[nn.Sequential]:
    """Return the layers of `module` as `count` stages, in order.

    `cuts` names the layers that begin the later stages ("layer2,layer3" for three stages). Without it each
    stage has the same number of layers with parameters, the earlier ones one more where that is not even:
    ResNet-50 in two is the stem, layer1 and layer2, then layer3, layer4 and fc. Raises `UsageError` where the
    model is not an `nn.Sequential`, has too few layers, or `cuts` does not fit it.
    """
    if not isinstance(module, nn.Sequential):
        raise UsageError(
            f"only an nn.Sequential can be split into stages, and this model is a {type(module).__name__}: "
            "write it as a sequence of layers (see train/models.py), or use --parallel ddp or fsdp"
        )
    layers = dict(module._modules.items())  # named_children would omit a layer that is used twice
    starts = _named_starts(cuts, list(layers), count) if cuts else _balanced_starts(module, count)
    bounds = zip([0, *starts], [*starts, len(layers)], strict=True)
    stages = [nn.Sequential(OrderedDict(list(module._modules.items())[a:b])) for a, b in bounds]
    _check_parameters(stages)
    return stages


def _balanced_starts(module: nn.Sequential, count: int) -> list[int]:
    names = list(module._modules)
    with_parameters = [index for index, layer in enumerate(module) if _has_parameters(layer)]
    if count > len(with_parameters):
        raise UsageError(
            f"{count} stages, but this model has only {len(with_parameters)} layers with parameters "
            f"({', '.join(names[index] for index in with_parameters)}): use a larger --model, or start fewer "
            "ranks"
        )
    each, more = divmod(len(with_parameters), count)
    return [with_parameters[stage * each + min(stage, more)] for stage in range(1, count)]


def _named_starts(cuts: str, names: list[str], count: int) -> list[int]:
    wanted = [name.strip() for name in cuts.split(",")]
    for name in wanted:
        if name not in names:
            raise UsageError(f"--cuts {cuts}: no layer is named {name!r}; choose from {', '.join(names[1:])}")
    if len(wanted) != count - 1:
        raise UsageError(
            f"--cuts {cuts}: {len(wanted)} layers make {len(wanted) + 1} stages, but there are {count}; "
            f"name {count - 1}"
        )
    indices = [names.index(name) for name in wanted]
    if sorted({0, *indices}) != [0, *indices]:
        raise UsageError(
            f"--cuts {cuts}: name layers in their order, without the first one and without repeating one; "
            f"the order is {', '.join(names)}"
        )
    return indices


def _check_parameters(stages: list[nn.Sequential]) -> None:
    owner: dict[int, int] = {}
    for number, stage in enumerate(stages):
        names = ", ".join(stage._modules)
        if not _has_parameters(stage):
            raise UsageError(f"stage {number} ({names}) would have no parameters: change --cuts")
        for parameter in stage.parameters():
            # Each stage would silently train a copy of its own.
            if owner.setdefault(id(parameter), number) != number:
                raise UsageError(
                    f"stages {owner[id(parameter)]} and {number} ({names}) share parameters: change --cuts "
                    "so that these layers are in one stage"
                )


def _has_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None
