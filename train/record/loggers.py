"""Services that show the numbers of a run. For another one, write a class with the methods of `Logger`, and
add it to `open_loggers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from train.config import Config
from train.errors import Preempted, UsageError


class Logger(Protocol):
    """Gets the numbers of each line of metrics.jsonl, on rank 0.

    An exception does not end the run: it is reported under `name`, and the logger gets no more lines.
    """

    name: str

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of one line; `kind` is train, evaluation or epoch."""
        ...

    def close(self, exit_code: int) -> None:
        """The run ends: 0 if it is complete, 143 if SIGTERM has stopped it."""
        ...


def no_loggers(_step: int) -> Sequence[Logger]:
    """Return none."""
    return ()


def open_loggers(config: Config, step: int) -> list[Logger]:
    """Return the loggers that the flags name, for a run that begins, or continues, at `step`.

    Raises `UsageError` for --wandb without the package, or where it refuses the run.
    """
    loggers: list[Logger] = []
    if config.output.tensorboard and (board := _tensorboard(config.folder / "tensorboard", step)) is not None:
        loggers.append(board)
    if config.output.wandb:
        loggers.append(WeightsAndBiases(config, step))
    return loggers


def reason(error: Exception) -> str:
    """Return the first line of the message of an exception, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class TensorBoard:
    """Writes TensorBoard events: a scalar KIND/NAME for each number."""

    name = "tensorboard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self, _exit_code: int) -> None:
        self._writer.close()


def _tensorboard(folder: Path, step: int) -> TensorBoard | None:
    # Imported here because it costs as much time as a short training run, and only rank 0 needs it.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return TensorBoard(SummaryWriter(folder, purge_step=step))


class WeightsAndBiases:
    """Logs to a project of Weights & Biases. A resumed run continues under the same id, which is kept in the
    folder."""

    name = "wandb"

    def __init__(self, config: Config, step: int) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise UsageError("--wandb needs the package wandb: pip install wandb, or remove it") from None
        project, kept = config.output.wandb, config.folder / "wandb-id.txt"
        name = kept.read_text().strip() if step and kept.exists() else wandb.util.generate_id()
        try:
            self._run = wandb.init(
                project=project,
                id=name,
                resume="allow",
                dir=str(config.folder),
                config=config.recorded(),
            )
        except Exception as error:  # it has many kinds: no key, no connection, no such project
            raise UsageError(
                f"--wandb {project}: cannot start a run ({reason(error)}); run `wandb login`, set "
                "WANDB_MODE=offline, or remove it"
            ) from error
        kept.unlink(missing_ok=True)  # may be a link to a file elsewhere
        kept.write_text(name + "\n")

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self, exit_code: int) -> None:
        try:
            if exit_code == Preempted.exit_code:
                self._run.mark_preempting()
        finally:
            self._run.finish(exit_code=exit_code)
