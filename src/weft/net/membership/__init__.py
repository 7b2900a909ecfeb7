"""Who is alive: up to 32 members heartbeat to all, more of them use SWIM over a few links each.

    membership    the front: one of the two on a node, told as changes and as events
    full_mesh     the first, as pure decisions
    swim          the second, as pure decisions, and who links to whom; `gossip` runs it on a node

It says who is suspected. It does not know who has a vote.
"""
