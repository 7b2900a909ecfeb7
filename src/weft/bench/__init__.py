"""Methods compared by what they learn and what they send, on simulated machines: points, their log, a report.

It does not know how a machine is simulated.
"""
