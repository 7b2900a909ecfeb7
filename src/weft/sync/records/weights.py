"""What weighs how much in the mean of a round: what is brought to it, and what is late.

    mean = sum_i v_i x_i / (sum_i v_i + a)
    v_i  = w_i, the tokens of the delta x_i, or the quota q of a round where that is less
    a    = what was leased in this round to members that are late, in tokens

A member that is late brings the deltas of several rounds at once, as their sum. Weighed like one round's, with the late
counted in the divisor of the rounds that they missed, every inner step moves the outer parameters as far as if it had
been in time: no outer step is longer because others were lost before it. Where nobody is late, v_i = w_i and a = 0.

A late gradient is averaged with the next before it is sent, and is no sum: it weighs all its tokens, and nobody counts
in the divisor for it. In a stage of a pipeline what each member trains on is routed to it, and weighs what it is. Where
members exchange with neighbours, all weigh the same in a mean over all, and who is late is not in it: what is averaged
is parameters, not steps.
"""

from collections.abc import Container, Iterable

from weft.data.assign import Lease
from weft.ids import PeerId
from weft.sync.records import messages
from weft.sync.records.charter import Charter


def weight(charter: Charter, tokens: int) -> int:
    """Return the weight of what one peer trained on so many tokens."""
    settings = charter.settings
    if settings.method.graph is not None:
        return settings.quota_tokens
    is_sum = not settings.method.sends_gradient and not charter.is_routed
    return min(tokens, settings.quota_tokens) if is_sum else tokens


def weight_of(charter: Charter, contribution: messages.Brought) -> int:
    """Return the weight of what a member brings; of a group, the sum of its peers'."""
    claim, tokens = contribution.group, contribution.tokens
    if claim is None:
        return weight(charter, tokens)
    return min(claim.weight, tokens, (claim.num_counted + 1) * weight(charter, tokens))


def awaited_weight(
    charter: Charter, awaited: Container[PeerId], leases: Iterable[Lease], uncounted: Iterable[Lease]
) -> int:
    """Return what the late weigh.

    Args:
        leases: of the round.
        uncounted: all leases that no manifest has counted: what members are at work on where rounds wait for nobody.
            So each brings its share of the step whenever it comes, and all together make one of a whole step's length.
    """
    settings = charter.settings
    if settings.method.sends_gradient or settings.method.graph is not None:
        return 0
    due = leases if settings.method.wait == "all" else uncounted
    return settings.seq_len * sum(lease.num_windows for lease in due if lease.peer in awaited)
