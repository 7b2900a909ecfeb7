"""What all peers of a run share (`RunConfig`), what one machine gives to it (`PeerConfig`), and what holds after acts.

It does not know who takes part.
"""
