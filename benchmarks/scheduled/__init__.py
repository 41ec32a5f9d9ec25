"""What the benchmark of schedules trains."""
