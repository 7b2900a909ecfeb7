"""weft: train one transformer across machines that share neither a data centre nor trust.

The rooms, from the ground up (imports go downward only, never sideways):

    cli                                   one verb per file
    door                                  `weft.Sync`: any PyTorch loop as a peer
    peer                                  composition root: joins the rooms below
    inference                             sampling from a trained model
    sync                                  the distributed algorithms
    net                                   transports, calls, membership, transfer
    model  data  codec  cost              leaves: no sockets, no event loop, no clock
    errors ids clock rng keys wire config events        the ground floor
"""

from weft.lazy import __getattr__ as __getattr__

__version__ = "0.1.0"
