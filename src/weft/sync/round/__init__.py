"""One round of one branch as a pure machine: `step(state, input) -> (state, outputs)`.

    round      who contributes, who merges which part; one manifest, by a majority
    rules      what a member may promise, accept and count
    shares     who trains on how much next, and owns how large a part

It does not know how messages travel, nor what payloads hold.
"""
