"""Audits, at both ends: what a peer names and keeps of what it does, and what an auditor asks of it.

heads      what this peer knows of the states that segments begin at
steps      training steps, made again
trace      a worker's states, named one after the other, and what is needed to come to them again
between    states inside a lease, so that few steps are made again
worker     shows states to whoever was drawn
looking    one audit as a machine: what is done next, and what it comes to
reach      where training steps can lead, whatever they were made of
checks     what a worker shows, checked before any step is made again
auditor    asks, does the steps again, and says what came of it
sealing    what auditors came to, sealed before they are shown the worker's, and opened
proofs     evidence of what an audit has come to, for all to check
merges     parts that owners have merged: what they were made of, and the same again
kept       what others may need of rounds gone by
counters   what false works have moved, taken out again
audits     draws, and what follows from what was found
leases     whole leases, shown to whoever keeps or checks them, and made again
"""
