"""The live view of a terminal: what it knows, how that is drawn, and where."""
