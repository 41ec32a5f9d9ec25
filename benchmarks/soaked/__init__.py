"""What ``soak.py`` trains, and what a process holds."""
