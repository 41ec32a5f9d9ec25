"""Tests the loss of a real training under a lossy strategy, and falls back to exact steps."""
