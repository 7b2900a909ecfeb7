"""The vectors of all modules, and models over them.

A path's model is an ordinary decoder whose parameters are views into the vectors of its modules: two paths that share a
module share its memory. Who trains a path trains a copy (`Modules.vector`), and takes the copy apart again (`parts`).
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from weft.compose.paths.levels import Levels, Module, Path
from weft.errors import ConfigError
from weft.model.flat import cut, layout, paste
from weft.model.transformer import Transformer


class Modules:
    """
    Args:
        vectors: of each module, flat fp32.

    Raises:
        ConfigError: a module is missing, or its vector is of another length.
    """

    def __init__(self, levels: Levels, vectors: Mapping[Module, Float32[Tensor, " num"]]) -> None:
        for module in levels.modules:
            found = vectors[module].numel() if module in vectors else 0
            if found != levels.num_parameters(module):
                raise ConfigError(
                    f"module {module.number} of level {module.level} has {levels.num_parameters(module):,} parameters, "
                    f"its vector {found:,}. It belongs to other levels, or is missing."
                )
        self.levels = levels
        self.vectors = {module: vectors[module] for module in levels.modules}

    @classmethod
    def of(cls, levels: Levels, vector: Float32[Tensor, " num"]) -> "Modules":
        """Return modules that all begin as one trained model: each path computes what that did."""
        pieces = {module: cut(levels.model, vector, levels.section_of(module)) for module in levels.modules}
        return cls(levels, pieces)

    def vector(self, path: Path) -> Float32[Tensor, " num"]:
        """Return the flat vector of a path's model: a copy."""
        mine = self.levels.modules_of(path)
        whole = torch.empty(self.levels.num_path_parameters)
        for module in mine:
            paste(self.levels.model, whole, self.levels.section_of(module), self.vectors[module])
        return whole

    def parts(self, path: Path, vector: Float32[Tensor, " num"]) -> dict[Module, Float32[Tensor, " part"]]:
        """Return what each module of a path has of a path's vector: copies."""
        model, section_of = self.levels.model, self.levels.section_of
        return {module: cut(model, vector, section_of(module)) for module in self.levels.modules_of(path)}

    def model(self, path: Path) -> Transformer:
        """Return a path's model for inference, over the modules as they are: no copy."""
        with torch.device("meta"):
            model = Transformer(self.levels.model)
        for module in self.levels.modules_of(path):
            spans = layout(self.levels.model, self.levels.section_of(module))
            for span in spans:
                owner, _, leaf = span.name.rpartition(".")
                view = nn.Parameter(spans.view(self.vectors[module], span), requires_grad=False)
                setattr(model.get_submodule(owner), leaf, view)
        return model.eval()

    def copy(self) -> "Modules":
        return Modules(self.levels, {module: vector.clone() for module, vector in self.vectors.items()})
