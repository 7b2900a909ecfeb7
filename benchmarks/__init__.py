"""Benchmarks: each measures one thing beside its peer and writes a report. `python -m benchmarks` lists them."""
