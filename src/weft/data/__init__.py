"""Text to training windows: corpora, tokenizers, shards named by digest, and who trains on what.

The maker of a run: `make_tokenizer`, then `pack` into a `ShardStore`; the `DataIndex` it returns and the
tokenizer's digest go into the genesis. Every other peer: fetch what `ShardStore.missing` lists, hand it to `add`.
Then each round: `leases` says whose positions are whose, and `weft.data.batch.Batches` turns positions into tensors.
`weft.data.batch` alone needs torch, which a light command should not wait for.
"""
