"""A peer without torch and without a vote: it keeps addresses and the newest state of a run for whoever comes.

It does not know what the bytes of a state mean.
"""
