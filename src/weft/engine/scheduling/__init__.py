"""What the next step computes: whose turn it is, how many tokens, what is guessed to follow, in which pages."""
