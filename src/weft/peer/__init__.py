"""A peer of one run: it trains, takes part in rounds, keeps and gives the state, comes and goes.

    peer       the front: what follows what in a peer's life
    chain      the manifests of a branch, and the choice between branches
    fork       where a branch opens, and where it is left
    state/     what all members have alike, and what this one alone has trained
    round/     the round machine of `weft.sync.round` on a node
    join/      how a peer comes in, and how it helps others to
    group/     contributing through a member where there are more peers than votes
    loop/      contributions, evaluation, pauses, the end

It does not know from which file or ticket it was started (`weft.launch`), nor who shows what it tells.
"""
