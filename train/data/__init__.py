"""Data: the datasets, which samples each rank takes, reading them in batches, and augmentation."""
