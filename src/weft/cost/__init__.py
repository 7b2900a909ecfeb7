"""Closed forms: bytes, seconds and memory of a peer, a round and a section. It needs no torch and no machine."""
