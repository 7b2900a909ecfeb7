"""Verbs that reckon and play: plan, methods, bench, simulate, and how fast this machine is."""
