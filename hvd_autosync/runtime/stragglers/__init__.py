"""Stragglers: their detection, and policies that mitigate them."""
