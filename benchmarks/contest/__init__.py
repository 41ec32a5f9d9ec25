"""Parts of ``learners.py``."""
