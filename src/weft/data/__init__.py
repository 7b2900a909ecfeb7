"""Text to training windows: corpora, tokenizers, shards named by digest, and who trains on what.

The maker of a run: `make_tokenizer`, then `pack` into a `ShardStore`; the `DataIndex` it returns and the
tokenizer's digest go into the genesis. Every other peer: fetch what `ShardStore.missing` lists, hand it to `add`.
Then each round: `leases` says whose positions are whose, and `weft.data.batch.Batches` turns positions into tensors.

`weft.data.batch` is not re-exported: it alone needs torch, which a light command should not wait for.
"""

from weft.data.assign import Lease, leases, num_windows, release, windows_at
from weft.data.corpus import (
    BinSource,
    CorpusConfig,
    DatasetSource,
    JsonlSource,
    ParquetSource,
    SourceConfig,
    Split,
    StdlibSource,
    TextSource,
)
from weft.data.ngram import NgramModel
from weft.data.packing import BytesConfig, CharactersConfig, JsonConfig, TokenizerConfig, make_tokenizer, pack
from weft.data.store import PRIVATE, READ_ONLY, DataIndex, ShardInfo, ShardStore, write_atomically
from weft.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    Tokenizer,
    check_vocabulary,
    from_bytes,
    train_bpe,
)

__all__ = [
    "PRIVATE",
    "READ_ONLY",
    "BinSource",
    "ByteTokenizer",
    "BytesConfig",
    "CharTokenizer",
    "CharactersConfig",
    "CorpusConfig",
    "DataIndex",
    "DatasetSource",
    "JsonConfig",
    "JsonTokenizer",
    "JsonlSource",
    "Lease",
    "NgramModel",
    "ParquetSource",
    "ShardInfo",
    "ShardStore",
    "SourceConfig",
    "Split",
    "StdlibSource",
    "TextSource",
    "Tokenizer",
    "TokenizerConfig",
    "check_vocabulary",
    "from_bytes",
    "leases",
    "make_tokenizer",
    "num_windows",
    "pack",
    "release",
    "train_bpe",
    "windows_at",
    "write_atomically",
]
