"""EC2's rules that moto leaves out, one subject per module; `install.install` patches them into moto once per
process.

They apply wherever moto runs: in the server, and in process (`cloudddp.simulator.aws.rehearse`). Nothing here
depends on nodes: what runs behind an instance, and how long its states take, is decided in hosts/.
"""
