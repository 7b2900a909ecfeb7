"""Benchmarks: each writes a report with its command, versions, raw figures, and the ratio against a peer it ran beside.

python -m benchmarks            runs all of them; names after it run only those
"""
