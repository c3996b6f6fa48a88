"""One namespace node: the program that boots it, its root file system, and how the simulator starts the
program."""
