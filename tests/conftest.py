"""What every test shares: shapes in signatures are checked while tests run, and no test asserts wall time."""

from hypothesis import settings
from jaxtyping import install_import_hook

# Before any weft module is imported: every annotated function of these rooms checks its tensors' shapes.
install_import_hook(["weft.model", "weft.codec", "weft.sync"], "beartype.beartype")

# A slow machine is no fault of the code: hypothesis does not time examples.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")
