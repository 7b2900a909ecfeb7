"""What members make of vectors: encoded, cut into parts, averaged, applied, to the same bits on every machine.

It does not know who agreed on what is merged.
"""
