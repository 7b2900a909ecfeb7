"""From what the peers of a run share back to a run file, which makes the same run anew.

Paths are not among what they share: where the run read text, `paths` are for whoever repeats it to name.
"""

from weft.data import BytesConfig, ByteTokenizer, JsonConfig
from weft.pipeline.config import PipelineConfig
from weft.run.config import FolderModel, RunConfig, RunFile, ShapedModel
from weft.run.genesis import of_shape
from weft.run.staged import StagedConfig
from weft.sync.method.presets import spell_out
from weft.sync.records.messages import MAX_GROUP

MODEL, TOKENIZER = "model", "tokenizer.json"  # beside the run file, where it cannot say them itself: of an export


def run_file_of(run: RunConfig, num_peers: int) -> RunFile:
    """Return the run file; its corpus is the default one.

    Args:
        num_peers: to expect, as far as there is room for so many.
    """
    is_graph = spell_out(run.method, num_peers).graph is not None
    shape = ShapedModel(**{name: getattr(run.model, name) for name in ShapedModel.__struct_fields__})
    is_shape = run.is_seeded and of_shape(shape, run.data.vocab_size, run.train.seq_len) == run.model
    is_bytes = run.data.tokenizer == ByteTokenizer().digest
    staged = run if isinstance(run, StagedConfig) else None
    return RunFile(
        name=run.name,
        seed=run.seed,
        peers=min(num_peers, run.electors * (1 if is_graph else MAX_GROUP)),
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
        predecessor=run.predecessor,
        stages=1 if staged is None else staged.stages,
        pipeline=PipelineConfig() if staged is None else staged.pipeline,
    )
