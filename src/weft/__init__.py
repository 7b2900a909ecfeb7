"""weft: train one transformer across machines that share neither a data centre nor trust.

The rooms, from the ground up (imports go downward only, never sideways):

    cli  dashboard                          one verb per file; what people see
    sim  bench                              production peers on a virtual clock
    stages  library  ranks  plan  launch    around a peer: how it is started, as what, and what that will take
    peer                                    a peer of one run
    training  run  store  observe           this machine: inner steps, what all share, files, looking on
    sync  pipeline                          the distributed algorithms
    net                                     transports, calls, membership, blobs
    model  data  codec  cost  inference     leaves: no sockets, no event loop, no clock
    errors ids clock rng keys wire config events ...    the ground floor
"""

from weft.lazy import __getattr__ as __getattr__

__version__ = "0.1.0"
