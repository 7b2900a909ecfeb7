"""One peer of a run with stages: it holds some, passes micro-batches on, and moves where it is needed.

Each stage that it holds is a `peer.peer.Peer` of that stage's run, on a channel of the one node. `weft.pipeline`
passes micro-batches; this room joins the two. It does not know how anything is shown.
"""
