"""EC2 on this computer: a server that answers EC2's API, with a real SSH node behind every instance.

Two modules are for callers: `control` (start, find and stop the server; standard library only) and `aws` (the
same EC2 in this process, without nodes). Only the simulator uses moto, asyncssh and werkzeug, and only when
they are needed.

Of the rest of cloudddp it imports `errors` only. The simulator tests the product, so it must be independent
of it: with shared code for tags, inventory or files, both could have the same bug, and no test
would detect it. So it has its own implementation of what it needs.
"""
