"""Codecs: flat fp32 vectors to canonical bytes and back. `config` alone needs no torch: a codec's name does not."""
