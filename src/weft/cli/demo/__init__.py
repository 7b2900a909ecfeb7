"""`weft demo`: four peers on this machine, from an empty folder to a model that writes."""
