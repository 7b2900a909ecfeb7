"""What every test shares: shapes in signatures are checked while tests run."""

from jaxtyping import install_import_hook

# Before any weft module is imported: every annotated function of these rooms checks its tensors' shapes.
install_import_hook(["weft.model", "weft.codec", "weft.sync"], "beartype.beartype")
