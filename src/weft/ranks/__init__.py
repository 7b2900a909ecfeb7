"""A site as one peer: several processes or GPUs, on one machine or a few, that train one replica under torchrun.

    rank 0      the peer: network, rounds, files; says what is to be done      `learner`, `vector`, `orders`
    all ranks   a strip of every vector, and their rows of the model         `worker`, `shard`

It knows no peers and no rounds: to those a site is one peer like any other.
"""
