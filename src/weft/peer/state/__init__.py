"""What a peer has: the replica that is alike on all members, the carry that is its own, and both on disk.

It does not know who decided what is applied.
"""
