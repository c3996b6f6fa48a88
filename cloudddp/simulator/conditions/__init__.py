"""Conditions of the simulated account: scarce capacity, quotas, and calls that fail. Pure, standard library
only.

What a condition does to a request is implemented in api/proxy.py (calls) and in ec2/ (launches).
"""
