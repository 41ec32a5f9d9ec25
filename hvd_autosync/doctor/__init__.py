"""What would keep a job from being tuned, and what to do about it."""
