"""Codecs: flat fp32 vectors to canonical bytes and back.

`config` alone needs no torch. It does not know what a vector means, nor who sends it.
"""
