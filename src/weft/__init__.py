"""weft: train one transformer across machines that share neither a data centre nor trust.

The rooms, from the top (imports go downward only, never sideways):

    cli                                            one verb per file
    sim  bench                                     production peers on a virtual clock
    stages  library  launch  anchor                around a peer: how it is started, and as what
    plan  dashboard                                what a run will take; what people see of it
    peer                                           a peer of one run
    training  run  store  observe  ranks           this machine: inner steps, what all share, files, looking on
    sync  pipeline                                 the distributed algorithms
    net                                            transports, calls, membership, blobs
    model  data  codec  cost  inference            leaves: no sockets, no event loop, no clock
    errors ids clock rng wire keys config ...      the ground floor
"""

from weft.lazy import __getattr__ as __getattr__

__version__ = "0.1.0"
