"""What any room may need, workers included: it imports the standard library alone."""
