"""Groups: more peers than votes. A leaf contributes through an elector, its aggregator, and is told what was decided.

It does not know how an elector's round goes.
"""
