"""AWS: the only room that imports boto3. It asks, carries out and translates; what to ask for is decided elsewhere."""
