"""One stage in step with the others: when a step is over, which micro-batches its gradient is made of, what teams do.

`member` makes a peer of the stage's run, `conductor` is what that peer trains together with. It does not know which
stages a peer holds, nor why.
"""
