"""AWS: the only package that imports botocore. It sends requests and translates answers; callers decide what to send."""
