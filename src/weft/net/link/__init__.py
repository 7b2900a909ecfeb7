"""Connections that stand: how peers find each other, shake hands, and call each other.

    dialer    how this peer opens them, at another's addresses
    links     at most one to each peer; who knocks, and whether it may
    rpc       calls and notes over one of them

It does not know what is called, nor who is alive.
"""
