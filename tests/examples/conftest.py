"""No test of an example leaves a process behind."""

from support.training.fixtures import no_process_is_left  # noqa: F401
