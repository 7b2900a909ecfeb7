"""What a peer has: the replica that is alike on all members, the carry that is its own, both on disk; who else has it.

It does not know who decided what is applied.
"""
