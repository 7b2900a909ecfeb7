"""A stream of encrypted bytes to a verified key: over TLS, over iroh, or in memory for simulations.

`base` says what a transport must offer; whoever stands above knows no other file of it than that, `frame`, and what
bounds its use: `limits`, for files, memory, computing, and who is at the door. It does not know what the bytes mean,
nor whether a key may join.
"""
