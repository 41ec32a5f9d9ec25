"""Tuning and training of one job, with launched or live trials."""
