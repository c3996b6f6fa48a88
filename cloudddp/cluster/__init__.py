"""Clusters on EC2: plan, create, inspect, connect to and remove them. botocore stays in aws/, SSH in ssh/."""
