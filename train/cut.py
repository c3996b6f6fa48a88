"""Where a sequence of layers is cut into stages.

A stage is an `nn.Sequential` of the model's own layers under their own names, so the parameters of all stages
together are named as those of the whole model, and snapshots fit either. It must not know devices, ranks or how
stages are run.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from train.errors import UsageError


def cut(module: nn.Module, *, parts: int, cuts: str = "") -> list[nn.Sequential]:
    """The layers of `module` as `parts` stages, in order.

    `cuts` names the layers that begin the later stages ("layer2,layer3" for three stages). Without it each stage
    has the same number of layers with parameters, the earlier ones one more where that does not come out even:
    ResNet-50 in two is the stem, layer1 and layer2, then layer3, layer4 and fc. Raises `UsageError` where the model
    is not an `nn.Sequential`, has too few layers, or `cuts` does not fit it.
    """
    if not isinstance(module, nn.Sequential):
        raise UsageError(
            f"only an nn.Sequential can be cut into stages, and this model is a {type(module).__name__}: write it "
            "as a sequence of layers (see train/models.py), or choose --parallel ddp or fsdp"
        )
    layers = dict(module._modules.items())  # named_children would leave out a layer that is used twice
    begins = _given(cuts, list(layers), parts) if cuts else _even(layers, parts)
    bounds = zip([0, *begins], [*begins, len(layers)], strict=True)
    stages = [nn.Sequential(OrderedDict(list(layers.items())[a:b])) for a, b in bounds]
    _check_parameters(stages)
    return stages


def _even(layers: dict[str, nn.Module], parts: int) -> list[int]:
    weighty = [place for place, layer in enumerate(layers.values()) if _has_parameters(layer)]
    if parts > len(weighty):
        names = ", ".join(list(layers)[place] for place in weighty)
        raise UsageError(
            f"{parts} stages, but this model has {len(weighty)} layers with parameters ({names}): "
            "choose a larger --model, or start fewer ranks where each holds a stage"
        )
    each, more = divmod(len(weighty), parts)
    return [weighty[stage * each + min(stage, more)] for stage in range(1, parts)]


def _given(cuts: str, names: list[str], parts: int) -> list[int]:
    wanted = [name.strip() for name in cuts.split(",")]
    for name in wanted:
        if name not in names:
            raise UsageError(f"--cuts {cuts}: there is no layer {name!r}; choose from {', '.join(names[1:])}")
    if len(wanted) != parts - 1:
        raise UsageError(
            f"--cuts {cuts}: {len(wanted)} of them make {len(wanted) + 1} stages, but there are {parts}; "
            f"name {parts - 1}"
        )
    places = [names.index(name) for name in wanted]
    if sorted({0, *places}) != [0, *places]:
        raise UsageError(
            f"--cuts {cuts}: each must be a later layer than the one before it, and none the first; "
            f"the order is {', '.join(names)}"
        )
    return places


def _check_parameters(stages: list[nn.Sequential]) -> None:
    owner: dict[int, int] = {}
    for number, stage in enumerate(stages):
        names = ", ".join(stage._modules)
        if not _has_parameters(stage):
            raise UsageError(
                f"stage {number} ({names}) would have no parameters: name other layers in --cuts"
            )
        for parameter in stage.parameters():
            # Each stage would train a copy of its own, without a word.
            if owner.setdefault(id(parameter), number) != number:
                raise UsageError(
                    f"stages {owner[id(parameter)]} and {number} ({names}) share parameters: "
                    "name other layers in --cuts, so that these stay together"
                )


def _has_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None
