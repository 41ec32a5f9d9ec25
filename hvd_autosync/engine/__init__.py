"""One job from its line to the winner and its training, by real launches."""
