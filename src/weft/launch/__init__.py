"""From a run file or a ticket to a running process: identity, network, files, limits, and what a person is told before.

It does not know what the peer it starts does.
"""
