"""Who audits whose work, and what comes of it: pure, without torch.

draw        who is to do which training steps of a contribution again
seals       what auditors told before they were shown anything, and whether they open it
judge       how far two states may lie apart that honest machines come to
calibration whether this machine rounds as others do
steering    whether somebody steers within what is held for honest
suspicion   whom one looks at more often
evidence/   what shows that somebody signed what is not so
"""
