"""What shows that a member signed something that is not so, to anybody, without doing its work again: pure, no torch.

records     what is shown beside what was signed
shown       pieces of blobs, by their digests
blocks      a few numbers of an encoded vector
works       a work that contradicts itself, or the rounds that it names
merges      a part of a round that is not the mean of what was brought to it
steps       a training step that is not the optimizer's
operations  a gradient that is not that of a step's samples, by one of its operations
leased      which words of the run's data those are
program/    the operations of a step
evidence    all of these: what a warrant shows, and of whom
"""
