"""Files of this machine: the folders of a home, records replaced whole, the journal, votes, chunks of states.

It does not know what a run decided, nor who asked.
"""
