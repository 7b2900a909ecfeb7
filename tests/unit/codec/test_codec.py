import msgspec
import pytest

from weft.codec.blocks import Blocks
from weft.codec.build import build
from weft.codec.config import CodecConfig
from weft.codec.dense import Bf16, Fp32
from weft.config import Config, from_tree
from weft.errors import ConfigError


class Holder(Config, frozen=True, kw_only=True):
    codec: CodecConfig


@pytest.mark.parametrize(
    ("tree", "kind", "nbytes"),
    [
        ({"type": "fp32"}, Fp32, 40_000),
        ({"type": "bf16"}, Bf16, 20_000),
        ({"type": "int8"}, Blocks, 10_000 + 4 * 40),
        ({"type": "int8", "block": 4096}, Blocks, 10_000 + 4 * 3),
    ],
)
def test_build_makes_the_codec_a_run_file_names(tree: dict[str, object], kind: type, nbytes: int) -> None:
    codec = build(from_tree({"codec": tree}, Holder, where="run.toml").codec)
    assert isinstance(codec, kind)
    assert codec.nbytes(10_000) == nbytes


@pytest.mark.parametrize("block", [0, 16, 33, 100, 8192])
def test_a_block_that_does_not_divide_a_part_is_refused(block: int) -> None:
    with pytest.raises(ConfigError, match="block"):
        from_tree({"codec": {"type": "int8", "block": block}}, Holder, where="run.toml")


def test_config_survives_canonical_bytes() -> None:
    holder = from_tree({"codec": {"type": "int8", "block": 64}}, Holder, where="run.toml")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(holder), type=Holder) == holder
