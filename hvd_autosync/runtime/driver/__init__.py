"""Communication of a worker with its driver: environment variables and messages."""
