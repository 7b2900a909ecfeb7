"""Sealing: a run file becomes what all peers share, and what a stranger's run says is not believed."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from weft import wire
from weft.config import from_tree
from weft.data import tokenizer
from weft.data.batch import Batches
from weft.data.store import ShardInfo
from weft.errors import ConfigError, DataError, GenesisMismatch, TokenizerMismatch, TooLarge
from weft.events import DataReady, Event, Notice
from weft.ids import Digest, PeerId
from weft.model.config import ModelConfig, named, num_parameters
from weft.model.initial import initial_vector
from weft.model.weights import write_folder
from weft.run import genesis as seal_module
from weft.run.config import MAX_PEERS, LoopConfig, RunConfig, RunFile
from weft.run.genesis import Sealed, initial, pack_private, read_run, seal
from weft.run.outline import public
from weft.sim.scenario import MAX_MACHINES
from weft.store.chunks import raw
from weft.store.home import Home
from weft.sync.method.choices import Choices, NesterovConfig

LIMIT = 1_000_000_000
PEER = PeerId("cd" * 32)
TRAIN = {"seq_len": 16, "batch_size": 2, "tokens": 10_000, "schedule": {"type": "constant"}}
SHAPE = {"type": "shape", "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 16, "ffn_width": 24}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run_file(base: Path, **changes: Any) -> RunFile:
    (base / "texts").mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (base / "texts" / f"{number}.txt").write_text(f"text number {number}, " + "and so on " * 10)
    tree: dict[str, Any] = {
        "name": "a run",
        "peers": 2,
        "model": SHAPE,
        "data": {"source": {"type": "text", "paths": ["texts"]}, "heldout_fraction": 0.2},
        "train": TRAIN,
    }
    return from_tree(tree | changes, RunFile, where="run.toml")


def sealed(tmp_path: Path, home: Home | None = None, **changes: Any) -> Sealed:
    return seal(run_file(tmp_path, **changes), tmp_path, home or Home(tmp_path / "home"), lambda event: None)


def tiny(vocab_size: int, seq_len: int = 16) -> ModelConfig:
    return msgspec.structs.replace(
        named("nano", vocab_size, seq_len), num_layers=1, num_heads=2, num_kv_heads=1, width=8, ffn_width=12
    )


# --- from the run file ---


def test_a_run_file_becomes_a_run_that_peers_can_fetch_whole(tmp_path: Path) -> None:
    events: list[Event] = []
    home = Home(tmp_path / "home")
    made = seal(run_file(tmp_path), tmp_path, home, events.append)
    config = made.config
    assert read_run(home.blobs.read(Digest(config.run), 1 << 20) or b"", LIMIT) == config
    assert made.index == config.data
    assert made.tokenizer.digest == config.data.tokenizer
    assert config.method == Choices(
        every=30, send="delta", apply=NesterovConfig(lr=0.6, momentum=0.9), codec=config.method.codec
    )
    shape = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 16, "ffn_width": 24}
    assert config.model == msgspec.structs.replace(named("nano", 257, 16), **shape)
    num_tokens = (config.data.num_tokens("train"), config.data.num_tokens("heldout"))
    assert events == [
        DataReady(num_shards=2, fetched_nbytes=0, train_tokens=num_tokens[0], heldout_tokens=num_tokens[1])
    ]
    Batches(made.store, made.index, "train", 16, config.seed).at(np.arange(4))


def test_a_run_that_ends_in_its_warm_up_is_sealed_and_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    late = TRAIN | {"schedule": {"type": "constant", "warmup_tokens": 20_000}}
    seal(run_file(tmp_path, train=late), tmp_path, Home(tmp_path / "home"), events.append)
    assert isinstance(events[-1], Notice)
    assert events[-1].text.startswith("train.tokens is 10,000: all of it is warm-up")


def test_a_run_whose_rate_is_0_at_its_first_step_is_sealed_and_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    over = {"type": "wsd", "decay_tokens": 10, "total_tokens": 40}
    short = TRAIN | {"tokens": 40, "schedule": over}
    seal(run_file(tmp_path, train=short), tmp_path, Home(tmp_path / "home"), events.append)
    assert isinstance(events[-1], Notice)
    assert events[-1].text.startswith("train.tokens is 40: a step of all peers has 64, and by then the learning rate")
    rate_of_its_own = {"type": "custom", "every": 1, "send": "gradient", "apply": {"type": "sgd"}}
    seal(run_file(tmp_path, train=short, method=rate_of_its_own), tmp_path, Home(tmp_path / "home"), events.append)
    assert not isinstance(events[-1], Notice)


def test_the_same_file_and_corpus_name_the_same_run_on_any_machine(tmp_path: Path) -> None:
    first, second = sealed(tmp_path / "a"), sealed(tmp_path / "b")
    assert first.config == second.config
    assert first.config.run == second.config.run
    (tmp_path / "b" / "texts" / "7.txt").write_text("other words " * 20)
    run_of_others = seal(
        msgspec.structs.replace(run_file(tmp_path / "c"), seed=1), tmp_path / "c", Home(tmp_path / "c"), print
    )
    assert run_of_others.config.run != first.config.run


def test_another_corpus_is_another_run(tmp_path: Path) -> None:
    first, file = sealed(tmp_path), run_file(tmp_path)
    (tmp_path / "texts" / "7.txt").write_text("other words " * 20)
    assert seal(file, tmp_path, Home(tmp_path / "home"), lambda event: None).config.run != first.config.run


def test_a_named_size_follows_tokenizer_and_sequence_length(tmp_path: Path) -> None:
    config = sealed(tmp_path, model={"type": "size", "size": "nano"}, tokenizer={"type": "characters"}).config
    assert config.model == named("nano", config.data.vocab_size, 16)
    assert config.data.vocab_size < 40


def test_a_shape_that_is_no_model_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_layers"):
        sealed(tmp_path, model=SHAPE | {"num_layers": 0})
    with pytest.raises(ConfigError, match=r"heads"):
        sealed(tmp_path, model=SHAPE | {"num_heads": 3})


def test_a_model_this_machine_cannot_hold_is_refused_before_the_corpus_is_read(tmp_path: Path) -> None:
    file = run_file(tmp_path, model={"type": "size", "size": "7b"}, data={"source": {"type": "text", "paths": ["no"]}})
    with pytest.raises(TooLarge, match=r"parameters; this machine takes at most 1,000,000"):
        seal(file, tmp_path, Home(tmp_path / "home"), lambda event: None, max_parameters=1_000_000)


def test_too_little_text_is_refused_with_the_figures(tmp_path: Path) -> None:
    train = TRAIN | {"seq_len": 4000}
    with pytest.raises(DataError, match=r"tokens hold \d windows of 4000, and the run needs 4 \(16001 tokens\)"):
        sealed(tmp_path, train=train)


@pytest.mark.parametrize(("peers", "electors", "is_taken"), [(1024, 32, True), (192, 3, True), (193, 3, False)])
def test_a_run_expects_no_more_peers_than_its_electors_find_room_for(
    tmp_path: Path, peers: int, electors: int, is_taken: bool
) -> None:
    if is_taken:
        assert run_file(tmp_path, peers=peers, electors=electors).peers == peers
        return
    with pytest.raises(ConfigError, match=r"peers is 193, but 3 with a vote have room for 192.*Raise electors"):
        run_file(tmp_path, peers=peers, electors=electors)


def test_a_run_of_as_many_as_are_played_may_be_written() -> None:
    assert MAX_PEERS == MAX_MACHINES


def test_too_little_text_for_hundreds_says_for_how_many(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs 2000 .*: 1000 peers make training steps of 2 samples each"):
        sealed(tmp_path, peers=1000)
    many = sealed(tmp_path, peers=60, method={"type": "diloco"}).config.method.apply
    assert isinstance(many, NesterovConfig)
    assert many.lr == 0.8


# --- a Hugging Face folder ---


def folder(tmp_path: Path, tokens: tokenizer.Tokenizer, vocab_size: int) -> torch.Tensor:
    config = tiny(vocab_size)
    vector = initial_vector(config, 5)
    write_folder(tmp_path / "hf", config, vector, tokens.to_json(), stop_id=tokens.end_of_text)
    return vector


def test_a_folder_gives_shape_weights_and_tokenizer(tmp_path: Path) -> None:
    tokens = tokenizer.train_bpe(["text number and so on " * 9], 270)
    vector = folder(tmp_path, tokens, 270)
    home = Home(tmp_path / "home")
    model, named_tokenizer = {"type": "folder", "path": "hf"}, {"type": "json", "path": "hf"}
    made = sealed(tmp_path, home, model=model, tokenizer=named_tokenizer)
    assert not made.config.is_seeded
    assert made.config.initial == wire.digest(raw(vector))
    assert made.tokenizer.encode("text number 7").tolist() == tokens.encode("text number 7").tolist()
    again = initial(made.config, home)
    assert again is not None
    assert torch.equal(again, vector)
    assert msgspec.structs.replace(made.config.model, norm_eps=1e-5, head_width=None) == tiny(270)


@pytest.mark.parametrize("vocab_size", [64, 1000])
def test_a_folder_with_another_vocabulary_is_a_mismatch_that_names_the_fix(tmp_path: Path, vocab_size: int) -> None:
    folder(tmp_path, tokenizer.ByteTokenizer(), vocab_size)
    with pytest.raises(TokenizerMismatch, match=rf"257 ids, but the model {vocab_size}.*path = \"hf\""):
        sealed(tmp_path, model={"type": "folder", "path": "hf"})


def test_sequences_longer_than_a_folders_context_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer.ByteTokenizer(), 257)
    with pytest.raises(ConfigError, match=r"train.seq_len is 17, the model's longest context 16"):
        sealed(tmp_path, model={"type": "folder", "path": "hf"}, train=TRAIN | {"seq_len": 17})


def test_a_folders_vector_that_has_not_come_yet_is_none(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer.ByteTokenizer(), 257)
    made = sealed(tmp_path, model={"type": "folder", "path": "hf"})
    joiner = Home(tmp_path / "joiner")
    assert initial(made.config, joiner) is None
    wrong = msgspec.structs.replace(made.config, initial=joiner.blobs.put(bytes(8)))
    with pytest.raises(ConfigError, match="initial weights have 8 bytes"):
        initial(wrong, joiner)


# --- the first weights and the tokenizer ---


def test_the_seeded_vector_is_the_one_of_the_genesis(tmp_path: Path) -> None:
    config = sealed(tmp_path).config
    vector = initial(config, Home(tmp_path / "elsewhere"))
    assert vector is not None
    assert vector.numel() == num_parameters(config.model)
    assert config.initial == wire.digest(vector.numpy().astype("<f4").tobytes())
    other = msgspec.structs.replace(config, initial=Digest("0" * 64))
    with pytest.raises(GenesisMismatch, match=f"gives the initial weights {config.initial[:8]} here, but 00000000"):
        initial(other, Home(tmp_path))


# --- what is served ---


def stored(home: Home) -> dict[str, list[Digest]]:
    places = {"blobs": home.blobs.folder, "shards": home.shards.folder, "private": home.private.folder}
    return {
        name: [Digest(path.name) for path in place.iterdir()] if place.exists() else []
        for name, place in places.items()
    }


def test_what_the_run_names_is_served_and_nothing_else(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    config = sealed(tmp_path, home).config
    lookup = public(config, config.run, home)
    wanted = [Digest(config.run), config.data.tokenizer, *(info.digest for info in config.data.train)]
    for digest in [*wanted, *(info.digest for info in config.data.heldout)]:
        data = lookup(PEER, digest)
        assert data is not None
        assert wire.digest(data) == digest
    other = [home.blobs.put(b"of another run"), home.shards.put(b"of another run too")]
    assert [lookup(PEER, digest) for digest in [*other, config.initial, Digest("../../x")]] == [None] * 4


def test_a_shard_found_corrupt_is_not_served(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    config = sealed(tmp_path, home).config
    path = home.shards.folder / config.data.train[0].digest
    path.chmod(0o644)
    path.write_bytes(b"changed")
    assert public(config, config.run, home)(PEER, config.data.train[0].digest) is None


def test_no_private_shard_is_named_or_served(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    made = sealed(tmp_path, home, is_private=True)
    here = stored(home)
    own = {info.digest for info in (*made.index.train, *made.index.heldout)}
    assert set(here["private"]) == own
    assert here["shards"] == []
    assert len(own) == 2
    assert (made.config.data.train, made.config.data.heldout, made.config.data.train_text_nbytes) == ((), (), 0)
    lookup = public(made.config, made.config.run, home)
    assert {digest for place in here.values() for digest in place if lookup(PEER, digest) is not None} == {
        made.config.run,
        made.config.data.tokenizer,
    }
    blobs = b"".join((home.blobs.folder / digest).read_bytes() for digest in here["blobs"])
    assert not any(digest.encode() in blobs or b"and so on" in blobs for digest in own)
    Batches(made.store, made.index, "heldout", 16, 0)


def test_a_peer_of_a_private_run_packs_its_own_files_apart(tmp_path: Path) -> None:
    made = sealed(tmp_path, is_private=True)
    base, home = tmp_path / "joiner", Home(tmp_path / "joiner home")
    own = run_file(base)
    (base / "texts" / "3.txt").write_text("my own words " * 30)
    index = pack_private(made.config, made.tokenizer, made.came_with, own.data, base, home, lambda event: None)
    assert stored(home)["shards"] == []
    assert set(stored(home)["private"]) == {info.digest for info in (*index.train, *index.heldout)}
    assert index != made.index
    assert all(public(made.config, made.config.run, home)(PEER, info.digest) is None for info in index.train)
    long = msgspec.structs.replace(made.config.train, seq_len=5000)
    large = msgspec.structs.replace(made.config, model=tiny(257, 5000), train=long)
    with pytest.raises(DataError, match="too small"):
        pack_private(large, made.tokenizer, made.came_with, own.data, base, home, lambda event: None)


# --- what a stranger's run may say ---


def encoded(config: RunConfig, **paths: Any) -> bytes:
    """Return canonical bytes of `config` with fields changed past every check of ours: what a liar sends."""
    tree = msgspec.to_builtins(config)
    for path, value in paths.items():
        *sections, field = path.split("__")
        inner = tree
        for section in sections:
            inner = inner[section]
        inner[field] = value
    return msgspec.msgpack.Encoder(order="sorted").encode(tree)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return sealed(tmp_path_factory.mktemp("seal")).config


def test_an_honest_run_is_accepted(config: RunConfig) -> None:
    assert read_run(encoded(config), LIMIT) == config


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"model__width": 65536, "model__num_layers": 1024, "model__ffn_width": 1 << 18}, TooLarge, "parameters"),
        ({"model__vocab_size": 1 << 22, "model__width": 1024}, TooLarge, "parameters"),
        ({"train__seq_len": 1 << 20, "model__max_seq_len": 1 << 20, "train__batch_size": 1 << 16}, TooLarge, "step"),
        ({"train__seq_len": 1 << 22, "model__max_seq_len": 1 << 22}, ConfigError, "seq_len"),
        ({"train__seq_len": 17}, ConfigError, "longest context 16"),
        ({"train__tokens": 1 << 63}, ConfigError, "train.tokens"),
        ({"train__batch_size": 0}, ConfigError, "batch_size"),
        ({"train__clip": math.nan}, ConfigError, "clip"),
        ({"method__apply__lr": math.inf}, ConfigError, "lr"),
        ({"orphan_after_s": math.nan}, ConfigError, "orphan_after_s"),
        ({"orphan_after_s": math.inf}, ConfigError, "orphan_after_s = inf"),
        ({"train__schedule__lr": math.nan}, ConfigError, "lr"),
        ({"format": 2}, ConfigError, "format 2, this weft reads 1"),
        ({"name": "/etc/passwd"}, ConfigError, "name"),
        ({"name": "a\n"}, ConfigError, "name"),
        ({"initial": "../../etc/passwd"}, ConfigError, "initial"),
        ({"data__tokenizer": "http://example.invalid/"}, ConfigError, "tokenizer"),
        ({"data__path": "/etc/passwd"}, ConfigError, "path"),
        ({"model__path": "hf"}, ConfigError, "path"),
        ({"command": "rm"}, ConfigError, "command"),
        ({"data__train": []}, DataError, "too small"),
        ({"data__heldout": []}, DataError, "too small"),
        ({"is_private": True}, ConfigError, "says that it is private"),
        ({"data__vocab_size": 300}, ConfigError, "tokenizer has 300 tokens"),
        ({"method__every": 0}, ConfigError, "every"),
        ({"admission": {"admit": "keys", "keys": ["x"]}}, ConfigError, "keys"),
    ],
)
def test_a_hostile_run_is_refused(config: RunConfig, changes: Any, kind: type[ConfigError], match: str) -> None:
    with pytest.raises(kind, match=match):
        read_run(encoded(config, **changes), LIMIT)


def test_a_sample_with_more_logits_than_the_machine_holds_numbers_is_refused(config: RunConfig) -> None:
    long = encoded(config, train__seq_len=64, model__max_seq_len=64, train__batch_size=1)
    assert read_run(long, 64 * 257).train.seq_len == 64
    with pytest.raises(TooLarge, match="16,448 logits; this machine takes at most 16,447"):
        read_run(long, 64 * 257 - 1)


def test_a_run_longer_than_a_record_is_dropped_unread(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="exceeds the bound"):
        read_run(bytes(seal_module.MAX_RUN_NBYTES + 1), LIMIT)


def test_a_clip_that_does_not_clip_is_allowed(config: RunConfig) -> None:
    assert read_run(encoded(config, train__clip=math.inf), LIMIT).train.clip == math.inf


@given(st.binary(max_size=200))
def test_noise_is_no_run(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read_run(data, LIMIT)


@given(st.data())
def test_a_run_with_bytes_changed_is_refused_or_another_run(config: RunConfig, data: st.DataObject) -> None:
    changed = bytearray(wire.encode(config))
    for place in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=3)):
        changed[place] ^= data.draw(st.integers(1, 255))
    with suppress(ConfigError):
        assert wire.encode(read_run(changed, LIMIT)) == bytes(changed)


# --- nothing in a run can name a place ---

PLACES = (
    "/etc/passwd",
    "../secret",
    "a/b",
    "C:\\x",
    "\\\\host\\share",
    "~/x",
    "file:///x",
    "https://example.invalid/x",
    "example.invalid:80",
    "$(rm)",
    "`rm`",
    "a\n",
)
# Text that is only ever given to a tokenizer; names that are only ever compared and shown.
FREE_TEXT = {"TrainConfig.sample_prompt"}
FREE_NAMES = {"TensorConfig.name", "FrozenConfig.name"}


def texts_in(kind: inspect.Type, place: str, seen: set[type]) -> Iterator[tuple[str, inspect.Type]]:
    """Yield every place of a type that can hold text or bytes, or a type not known to hold none."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from texts_in(inner, place, seen)
        case inspect.UnionType(types=types):
            for member in types:
                yield from texts_in(member, place, seen)
        case inspect.StructType(cls=cls, fields=fields):
            if cls not in seen:
                seen.add(cls)
                for field in fields:
                    yield from texts_in(field.type, f"{cls.__name__}.{field.name}", seen)
        case inspect.VarTupleType(item_type=item):
            yield from texts_in(item, place, seen)
        case inspect.TupleType(item_types=items):
            for number, item in enumerate(items):
                yield from texts_in(item, f"{place}.{number}", seen)
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return
        case _:
            yield place, kind


def can_name_a_place(kind: inspect.Type) -> bool:
    if not isinstance(kind, inspect.StrType):
        return True
    return kind.pattern is None or any(re.search(kind.pattern, place) for place in PLACES)


def test_no_field_of_a_run_can_hold_a_path_or_address() -> None:
    found = dict(texts_in(inspect.type_info(RunConfig), "RunConfig", set()))
    assert {"RunConfig.name", "RunConfig.initial", "ShardInfo.digest", "DataIndex.tokenizer"} <= set(found)
    assert {place for place, kind in found.items() if can_name_a_place(kind)} == FREE_TEXT
    of_loops = dict(texts_in(inspect.type_info(LoopConfig), "LoopConfig", set()))
    assert {place for place, kind in of_loops.items() if can_name_a_place(kind)} == FREE_NAMES


def test_a_field_that_could_hold_a_path_is_found() -> None:
    found = dict(texts_in(inspect.type_info(RunFile), "RunFile", set()))
    assert {place for place, kind in found.items() if can_name_a_place(kind)} > FREE_TEXT | {"FolderModel.path"}


def test_a_shard_too_large_for_a_blob_is_no_shard(config: RunConfig) -> None:
    info = msgspec.to_builtins(config.data.train[0]) | {"nbytes": 1 << 40, "num_tokens": 1 << 39}
    assert not isinstance(info, ShardInfo)
    with pytest.raises(ConfigError, match="nbytes"):
        read_run(encoded(config, data__train=[info]), LIMIT)
