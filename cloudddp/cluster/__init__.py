"""Clusters on EC2: plan, create, inspect, connect to and remove them. boto3 stays in aws/, SSH in ssh/."""
