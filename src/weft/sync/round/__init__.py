"""One round of one branch as a pure machine: `step(state, input) -> (state, outputs)`.

    collect    who contributes, who merges which part
    decide     one manifest, by a majority; `rules` has each rule of it
    leases     who trains on how much next

It does not know how messages travel, nor what payloads hold.
"""
