"""Helpers for all packages, workers included; they import only the standard library."""
