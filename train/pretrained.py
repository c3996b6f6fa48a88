"""--weights and --freeze: what a model begins with, and what of it is trained."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from train.checkpoint.best import weights_of
from train.config import Config
from train.errors import UsageError
from train.parallel.strategy import Strategy


def prepare(config: Config, module: nn.Module) -> list[str]:
    """Load the weights into the module and freeze layers, as the flags say. Returns the notes to print.

    Raises `UsageError` for a file that cannot be read or does not fit, and for a layer that does not exist.
    """
    flags, notes = config.model, []
    if flags.weights:
        notes.append(_load(module, Path(flags.weights), exactly=config.evaluation.evaluate))
    if flags.freeze:
        frozen = freeze(module, [name.strip() for name in flags.freeze.split(",")])
        notes.append(f"--freeze {flags.freeze}: {frozen} parameters are not trained")
    return notes


def freeze(module: nn.Module, layers: list[str]) -> int:
    """Do not train the parameters of these layers. Returns their number. Raises `UsageError` where a layer
    has none, or nothing is left to train."""
    frozen = 0
    for layer in layers:
        own = [
            one for name, one in module.named_parameters() if name == layer or name.startswith(f"{layer}.")
        ]
        if not own:
            known = ", ".join(dict.fromkeys(name.partition(".")[0] for name, _ in module.named_parameters()))
            raise UsageError(f"--freeze {layer}: no layer with parameters has this name; choose from {known}")
        for parameter in own:
            parameter.requires_grad_(False)
        frozen += sum(one.numel() for one in own)
    if not any(one.requires_grad for one in module.parameters()):
        raise UsageError("--freeze: nothing would be left to train; name fewer layers")
    return frozen


def _load(module: nn.Module, path: Path, *, exactly: bool) -> str:
    """Load the weights whose names and shapes fit. Returns what was loaded."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with the file
        raise UsageError(
            f"--weights {path}: cannot be read ({_reason(error)}); give a file of tensors that torch.save "
            "has written"
        ) from error
    weights = weights_of(loaded)
    if weights is None:
        raise UsageError(f"--weights {path}: holds no weights, only {type(loaded).__name__}")
    own = module.state_dict()
    fitting = {
        name: value for name, value in weights.items() if name in own and own[name].shape == value.shape
    }
    new = [name for name in own if name not in fitting]
    if not fitting or (exactly and new):
        raise UsageError(
            f"--weights {path}: does not fit this model ({_names(new)} of {len(own)} tensors are missing or "
            "have another shape); give another file or --model"
        )
    module.load_state_dict(fitting, strict=False)
    more = f"; new: {_names(new)}" if new else ""
    return f"--weights {path}: loaded {len(fitting)} of {len(own)} tensors{more}"


def load_exactly(strategy: Strategy, weights: dict[str, Tensor], path: Path) -> None:
    """Load the weights of the whole model. Raises `UsageError` where they do not fit."""
    try:
        strategy.load_model(weights)
    except (KeyError, RuntimeError, ValueError) as error:
        # The first line of load_state_dict only names the class.
        reason = (str(error).splitlines()[1:2] or [str(error)])[0].strip().rstrip(".")
        raise UsageError(
            f"{path} does not fit this model ({reason}); give another --out or --model"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # torch's own message explains how to disable this check
        return (
            "it is damaged, or holds objects other than tensors, which could execute code and are not loaded"
        )
    return (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
