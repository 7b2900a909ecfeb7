"""Inner steps on a device: what is asked of whatever trains, and what trains here.

    learner    what keeps a vector, and makes steps on it
    steps      steps that are shared, wherever the vector lies
    trainer    a vector on this machine's device; `section` and `tied` make steps of their own on it

`device` chooses where and in which precision, and says whether a run fits. It knows no peers, no rounds, no sockets.
"""
