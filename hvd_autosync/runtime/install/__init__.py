"""Installs the runtime in a worker before its script runs."""
