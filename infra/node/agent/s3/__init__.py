"""Copies of a job's results to Amazon S3."""
