"""Members of one space, one on the other: what comes out of one goes into the next."""
