"""Whole leases of counted works, for who keeps a run and for who comes to it.

starts     shows what counted works began and ended with
replays    makes their training steps again
earlier    what the run's parameters were then, for one that goes back
"""
