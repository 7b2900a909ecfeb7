"""weft: train one transformer across machines that share neither a data centre nor trust.

The rooms, from the ground up (imports go downward only, never sideways):

    cli                                   one verb per file
    peer                                  composition root: joins the rooms below
    inference                             sampling from a trained model
    sync                                  the distributed algorithms
    net                                   transports, calls, membership, transfer
    model  data  codec  cost              leaves: no sockets, no event loop, no clock
    errors ids clock rng keys wire config events        the ground floor
"""

__version__ = "0.1.0"
