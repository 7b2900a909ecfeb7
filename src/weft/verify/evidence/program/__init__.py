"""A training step in exact numbers as a list of operations in order, each of which anybody can make some numbers of.

    step        which operations: from the model's shape, and how many samples are computed at a time
    operation   what one is: what it reads, and how many numbers it comes to
    evaluate    all of them, one after the other
    grids       numbers that come out the same everywhere: `weft.training.numerics`, by numpy

    products    a b^T                    cells      number by number, and moved from place to place
    rows        one number of each row   samples    what depends on tokens
                                         gradients  the sum of all, and its length

What the numbers are is defined in `weft.training.numerics`; that both come to the same bits is tested. Two rules make
the list longer than a formula, and what has to be read for one number short. What is summed lies side by side: where
columns are, an operation of its own turns them into rows. And what depends on many rows, as the largest step of a grid,
is an operation of its own, too.

What it does not know: rows of whole texts, in which tokens do not see all that came before; a pull to the outer
parameters; adapters. Of those a majority judges.
"""
