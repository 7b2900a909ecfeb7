"""How a peer comes into a run and back into it, and how members let it: offers of states, their chunks, backpressure.

It does not know what is in a state.
"""
