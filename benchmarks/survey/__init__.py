"""Parts of ``tables.py``."""
