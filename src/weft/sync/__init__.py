"""The distributed algorithms: methods, exact outer steps, merging in parts, and the round that agrees on them."""
