"""Swarms of production peers on a virtual clock: what a run does on links and machines that are not there.

It does not know how a run is shown.
"""
