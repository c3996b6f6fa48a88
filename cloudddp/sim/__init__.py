"""EC2 on this computer: a server that answers EC2's API, with a real SSH node behind every instance.

Two modules are for callers: `control` (start, find and stop the server; standard library only) and `aws` (the same EC2
in this process, without nodes). Only the simulator uses moto, asyncssh and werkzeug, and only when they are needed.

It imports nothing of cloudddp but `errors` and `payload`. The simulator tests the product, so it must be an independent
witness: with the product's own code for tags, inventory or files, both could be wrong in the same way and agree. What
it needs of these it implements itself, although the code exists elsewhere.
"""
