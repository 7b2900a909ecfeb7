"""Bodies: layers of a decoder alone, taken apart and put together."""

import msgspec
import pytest
import torch

from unit.compose.stacks.small import CONFIG, batch, member, space, vector
from weft.compose.space import numbers_digest
from weft.compose.stacks.body import body, fresh, identity, joined, layers_of, require_fit, vector_of
from weft.errors import ConfigError
from weft.model.config import AdapterConfig
from weft.model.flat import cut, layout
from weft.model.initial import initial_vector
from weft.model.sections import middle


def test_a_fresh_body_is_what_its_layers_are_in_a_decoder() -> None:
    assert torch.equal(fresh(CONFIG, 5), cut(CONFIG, initial_vector(CONFIG, 5), middle(CONFIG)))


def test_an_identity_changes_nothing_and_has_all_else_to_be_trained() -> None:
    found = identity(CONFIG, 5)
    x = space().begin(batch().tokens)
    assert torch.equal(body(CONFIG, found)(x), x)
    changed = found != fresh(CONFIG, 5)
    written = {span.name for span in layout(CONFIG, middle(CONFIG)) if changed[span.offset : span.stop].any()}
    assert {name.split(".", 2)[2] for name in written} == {"attention.out.weight", "ffn.down.weight"}


def test_a_body_is_a_view_and_frozen() -> None:
    mine = vector(1)
    module, x = body(CONFIG, mine), space().begin(batch().tokens)
    before = module(x)
    assert not before.requires_grad
    mine.zero_()
    assert not torch.equal(module(x), before)


def test_a_body_comes_apart_into_layers_and_together_again() -> None:
    module = member(1)
    assert torch.equal(vector_of(module), vector(1))
    turned = body(CONFIG, joined(CONFIG, layers_of(module)[::-1]))
    x = space().begin(batch().tokens)
    assert not torch.equal(turned(x), module(x))
    assert torch.equal(vector_of(body(CONFIG, joined(CONFIG, layers_of(turned)[::-1]))), vector(1))


def test_a_digest_names_each_number() -> None:
    mine = vector(1)
    before = numbers_digest(mine)
    assert numbers_digest(mine.clone()) == before
    mine[-1] += 1e-6
    assert numbers_digest(mine) != before


def test_what_cannot_be_a_body_is_refused() -> None:
    with pytest.raises(ConfigError, match="merge the adapter"):
        body(msgspec.structs.replace(CONFIG, adapter=AdapterConfig(rank=2)), vector(1))
    with pytest.raises(ConfigError, match="different configs"):
        body(CONFIG, vector(1)[:-1])
    with pytest.raises(ConfigError, match="has width 32, the space 16"):
        require_fit(msgspec.structs.replace(CONFIG, width=32), space(), "it")
