"""AWS: the only package that imports boto3 and botocore. It sends requests and translates answers; callers
decide what to send."""
