"""The report of a job: one HTML page, from what is on this computer."""
