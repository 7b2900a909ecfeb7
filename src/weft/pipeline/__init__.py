"""A model cut into sections, each held by several peers: how micro-batches find their way through them.

It knows no rounds and no methods: how the peers of one stage agree on its parameters is handed in.
"""
