"""The loss guard: tests the loss of a real training under a lossy strategy, and falls back."""
