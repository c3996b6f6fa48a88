"""What a run reports: metrics, status, speed."""
