"""The parts of ``tuning_gain.py``: what is trained, who tunes, the match, and the tables."""
