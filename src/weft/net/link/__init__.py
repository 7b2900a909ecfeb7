"""Connections that stand: how peers find each other, shake hands, and call each other.

    dialer    how they come up: out, at a peer's addresses, and in, who knocks and whether it may
    links     at most one to each peer
    rpc       calls and notes over one of them

It does not know what is called, nor who is alive.
"""
