"""Connections that stand: how peers find each other, shake hands, and call each other.

    dialer      out: a peer's addresses in order, and again after a loss
    listener    in: who connects, and whether it may
    links       at most one to each peer
    rpc         calls and notes over one of them

It does not know what is called, nor who is alive.
"""
