"""A model cut into sections, each held by several peers: how micro-batches find their way through them.

    sender           sends micro-batches to a stage, and accepts one gradient of each; `routing` chooses the member
    worker           takes, computes and passes them on
    exactly_once     which weight gradients count
    placement        which stage a peer holds

It knows no rounds and no methods: how the peers of one stage agree on its parameters is handed in.
"""
