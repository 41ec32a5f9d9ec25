"""Gets into a worker before its script does."""
