"""What the tests in this folder need to start training processes."""

from support.training.fixtures import no_process_is_left  # noqa: F401
