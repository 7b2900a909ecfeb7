"""What a peer does beside its rounds: trains its lease, offers what came of it, evaluates, pauses, reports and ends.

It does not know how a round decides.
"""
