"""Models that were trained with no contact, and what is made of several: experts, stacks, paths.

A member is a trained model that says how it came to be; members of one space can be put one on the other. It knows no
peers and no network: each member is trained by a run of its own, or by one machine.
"""
