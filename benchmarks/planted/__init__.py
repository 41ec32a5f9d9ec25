"""What ``guarding.py`` trains, and the strategies that it plants."""
