"""From what the peers of a run share back to a run file, which makes the same run anew.

Paths are not among what they share: where the run read text, `paths` are for whoever repeats it to name.
"""

from weft.data import BytesConfig, ByteTokenizer, JsonConfig
from weft.peer.config import FolderModel, RunConfig, RunFile, ShapedModel
from weft.peer.seal import of_shape

MODEL, TOKENIZER = "model", "tokenizer.json"  # beside the run file, where it cannot say them itself: of an export


def run_file_of(run: RunConfig, num_peers: int) -> RunFile:
    """Return the run file; its corpus is the default one."""
    shape = ShapedModel(**{name: getattr(run.model, name) for name in ShapedModel.__struct_fields__})
    is_shape = run.is_seeded and of_shape(shape, run.data.vocab_size, run.train.seq_len) == run.model
    is_bytes = run.data.tokenizer == ByteTokenizer().digest
    return RunFile(
        name=run.name,
        seed=run.seed,
        peers=num_peers,
        model=shape if is_shape else FolderModel(path=MODEL),
        is_private=run.is_private,
        tokenizer=BytesConfig() if is_bytes else JsonConfig(path=TOKENIZER),
        train=run.train,
        method=run.method,
        admission=run.admission,
        orphan_after_s=run.orphan_after_s,
        is_strict=run.is_strict,
        has_even_leases=run.has_even_leases,
        electors=run.electors,
        stewards=run.stewards,
    )
