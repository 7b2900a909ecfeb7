"""`weft doctor`: what this machine is, can reach and can hold; what is in the way, and what to do about it."""
