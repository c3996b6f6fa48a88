"""EC2's rules that moto leaves out, one subject to a room: each `install`s itself into moto's classes once.

They hold wherever moto runs, in the server and in process (`cloudddp.sim.aws.rehearse`). They know nothing of nodes:
what an instance is made of, and how long its states take, is lifecycle.py's business.
"""
