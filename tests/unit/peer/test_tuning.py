"""Peers that tune a chat model together, whole or by an adapter: TLS on loopback, a home for each."""

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from unit.chat.templates import CHATML
from unit.peer.crew import BATCH, EVERY, FEDAVG, Crew
from weft.cli.model.eval import heldout_of, measure
from weft.cli.model.trained import open_trained
from weft.clock import VirtualClock
from weft.config import from_tree
from weft.data.batch import Batches
from weft.data.corpus import ConversationsSource, CorpusConfig, PreferencesSource
from weft.data.packing import JsonConfig
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError, OutOfMemory
from weft.events import Evaluated, Event
from weft.launch.fetch import take_model
from weft.log import read_jsonl
from weft.model.config import AdapterConfig, ModelConfig, num_parameters
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.model.peft import read_adapter, write_adapter
from weft.model.weights import read_folder, write_folder
from weft.run.amend import run_file_of
from weft.run.config import DpoConfig, FolderAdapter, FolderModel, NewAdapter, RunConfig, RunFile
from weft.run.frozen import Frozen, base_of
from weft.run.genesis import initial, seal
from weft.run.machine import PeerConfig
from weft.sim.play import play
from weft.sim.scenario import Kind, Scenario
from weft.store.chunks import raw
from weft.store.home import Home
from weft.training import optimizer as inner
from weft.training.trainer import Trainer
from weft.wire import digest

SEQ_LEN, ROUNDS, PEERS = 192, 4, 2
MODEL = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=32, ffn_width=48, max_seq_len=SEQ_LEN
)
ADAPTER = NewAdapter(rank=2, alpha=8.0)


def crew_of(root: Path, **changes: Any) -> Crew:
    write_folder(root / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (root / "model" / "chat_template.jinja").write_text(CHATML)
    rows = [{"prompt": f"say {number}", "completion": f"ok {number}"} for number in range(60)]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = ROUNDS * PEERS * EVERY * BATCH * SEQ_LEN
    fields = {
        "num_peers": PEERS,
        "num_rounds": ROUNDS,
        "method": FEDAVG,
        "model": FolderModel(path="model"),
        "tokenizer": JsonConfig(path="model"),
        "data": CorpusConfig(source=ConversationsSource(paths=("chats.jsonl",)), heldout_fraction=0.2),
        "train": {"seq_len": SEQ_LEN, "tokens": tokens, "evaluate_every": 1},
    }
    return Crew(root, **(fields | changes))


def trained(crew: Crew) -> list[Any]:
    async def play() -> list[Any]:
        async with crew.deadline():
            a, b = crew.found("a", wait_for=2), crew.join("b")
            outcomes = list(await crew.done(a, b))
            losses = [event.loss for event in a.seen(Evaluated)]
            assert losses[-1] < losses[0]
            return outcomes

    return asyncio.run(play())


@pytest.mark.full
def test_two_peers_train_on_answers_alone(tmp_path: Path) -> None:
    outcomes = trained(crew_of(tmp_path))
    run = outcomes[0].run
    assert run.data.has_rows
    # Held-out loss per byte of answers: a token is a byte here.
    assert outcomes[0].nats_per_byte == pytest.approx(outcomes[0].loss)


@pytest.mark.full
def test_two_peers_train_an_adapter_and_exchange_nothing_else(tmp_path: Path) -> None:
    outcomes = trained(crew_of(tmp_path, adapter=ADAPTER))
    run = outcomes[0].run
    assert isinstance(run, RunConfig)
    assert run.num_parameters == num_parameters(run.model) < 0.2 * num_parameters(MODEL)
    _, vector = read_folder(tmp_path / "model")
    assert run.base == digest(raw(vector))
    for member in "ab":
        home = tmp_path / member
        found = open_trained(run.run, home)
        assert found.config == MODEL
        assert found.adapter is not None
        config, adapter, name = found.adapter
        assert name == run.base
        base = base_of(run, Home(home))
        assert base is not None
        assert torch.equal(base, vector)
        ids = torch.randint(0, 257, (1, 20))
        torch.testing.assert_close(assemble(MODEL, found.vector)(ids), assemble(config, adapter, base)(ids))
        assert not torch.allclose(found.vector, vector, atol=1e-4)
    found.export_adapter(tmp_path / "adapter")
    assert torch.equal(read_adapter(tmp_path / "adapter", MODEL)[1], adapter)
    found.export(tmp_path / "merged")
    assert torch.equal(read_folder(tmp_path / "merged")[1], found.vector)


@pytest.mark.full
def test_an_adapter_of_a_folder_is_trained_further(tmp_path: Path) -> None:
    first = trained(crew_of(tmp_path, adapter=ADAPTER))[0]
    before = open_trained(first.run.run, tmp_path / "a")
    before.export_adapter(tmp_path / "adapter")
    second = tmp_path / "second"
    second.mkdir()
    crew = crew_of(second, adapter=FolderAdapter(path="../adapter"))
    outcomes = trained(crew)
    run = outcomes[0].run
    assert before.adapter is not None
    assert run.model == before.adapter.config
    assert run.initial == digest(raw(before.adapter.vector))
    assert outcomes[0].loss < first.loss


def test_an_adapter_without_a_model_that_has_learnt_is_refused() -> None:
    train = {"tokens": 1000, "schedule": {"type": "constant"}}
    tree = {"name": "x", "model": {"type": "size"}, "adapter": {"type": "lora"}, "train": train}
    with pytest.raises(ConfigError, match="goes beside a model that has learnt"):
        from_tree(tree, RunFile, where="run.toml")


def test_an_adapter_of_another_base_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    config = replace(MODEL, ffn_width=64, adapter=AdapterConfig(rank=2))
    write_adapter(tmp_path / "adapter", config, initial_vector(config, 1))
    crew = crew_of(tmp_path, adapter=FolderAdapter(path="adapter"))

    async def play() -> None:
        async with crew.deadline():
            with pytest.raises(ConfigError, match="belongs to another base"):
                await crew.found("a").task

    asyncio.run(play())


def test_a_simulation_of_an_adapter_learns_as_its_peers_would(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, adapter=ADAPTER)
    scenario = Scenario(run="", kind=(Kind(name="lab", tokens_per_s=1e6, count=2),), limit_s=3600.0)
    with (tmp_path / "log.jsonl").open("wb") as log:
        played = play(scenario, crew.run_file, tmp_path, tmp_path / "play", log.write)
    assert played.broken == ()
    assert [machine.end for machine in played.machines] == 2 * ["complete"]
    assert len({machine.replica for machine in played.machines}) == 1
    losses = [entry.event.loss for entry in read_jsonl(tmp_path / "log.jsonl") if isinstance(entry.event, Evaluated)]
    assert losses[-1] < losses[0]


def test_the_file_of_such_a_run_says_whether_the_adapter_had_learnt(tmp_path: Path) -> None:
    crew, home = crew_of(tmp_path, adapter=ADAPTER), Home(tmp_path / "one")
    new = seal(crew.run_file, tmp_path, home, lambda _event: None).config
    assert run_file_of(new, num_peers=2).adapter == ADAPTER
    write_adapter(tmp_path / "adapter", new.model, initial_vector(new.model, 7))
    further = replace(crew.run_file, adapter=FolderAdapter(path="adapter"))
    learnt = seal(further, tmp_path, home, lambda _event: None).config
    assert run_file_of(learnt, num_peers=2).adapter == FolderAdapter(path="adapter")


def test_a_base_whose_weights_came_in_bf16_takes_two_bytes_a_number_and_loses_no_bit(tmp_path: Path) -> None:
    crew, home = crew_of(tmp_path, adapter=ADAPTER), Home(tmp_path / "one")
    whole = seal(crew.run_file, tmp_path, home, lambda _event: None).config
    assert isinstance(whole, RunConfig)
    assert (whole.base_nbytes, len(home.blobs.open(whole.base))) == 2 * (4 * num_parameters(MODEL),)  # type: ignore[arg-type]
    vector = initial_vector(MODEL, 3).bfloat16().float()
    (tmp_path / "half").mkdir()
    write_folder(tmp_path / "half" / "model", MODEL, vector, ByteTokenizer().to_json())
    for name in ("chats.jsonl", "model/chat_template.jinja"):
        (tmp_path / "half" / name).write_text((tmp_path / name).read_text())
    half = seal(crew.run_file, tmp_path / "half", home, lambda _event: None).config
    assert isinstance(half, RunConfig)
    assert (half.base_nbytes, len(home.blobs.open(half.base))) == 2 * (2 * num_parameters(MODEL),)  # type: ignore[arg-type]
    found = base_of(half, home)
    assert found is not None
    assert torch.equal(found, vector)


def test_who_could_not_take_the_device_again_still_holds_nothing_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew, home = crew_of(tmp_path, adapter=ADAPTER), Home(tmp_path / "one")
    sealed = seal(crew.run_file, tmp_path, home, lambda _event: None)
    run, base = sealed.config, base_of(sealed.config, home)
    first = initial(run, home)
    assert isinstance(run, RunConfig)
    assert first is not None
    batches = Batches(sealed.store, sealed.index, "train", run.train.seq_len, run.seed)
    trainer = Trainer(
        run, PeerConfig(device="cpu"), batches, list[Event]().append, VirtualClock(), lambda: Frozen(base)
    )
    trainer.start(first)
    trainer.park()

    def full(*_arguments: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(inner, "build", full)
        with pytest.raises(OutOfMemory):
            trainer.unpark()
    assert trainer.is_parked
    assert trainer._base_here is None
    trainer.unpark()
    trainer.train(np.arange(BATCH), 0, 1)
    assert not torch.equal(trainer.local(), first)


@pytest.mark.full
def test_two_peers_learn_what_is_preferred_and_eval_tells_it_alike(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {number}", "chosen": f"ok {number}", "rejected": f"no {number}"} for number in range(60)]
    crew = crew_of(
        tmp_path,
        adapter=ADAPTER,
        data=CorpusConfig(
            source=PreferencesSource(paths=("pairs.jsonl",), template="short.jinja"), heldout_fraction=0.2
        ),
        train={
            "seq_len": SEQ_LEN,
            "tokens": ROUNDS * PEERS * EVERY * BATCH * SEQ_LEN,
            "evaluate_every": 1,
            "loss": DpoConfig(beta=0.5),
        },
    )
    (tmp_path / "short.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes = trained(crew)
    first, second = (outcome.preferred for outcome in outcomes)
    assert first == second
    assert first is not None
    assert first.accuracy > 0.9
    assert first.margin > 0
    assert math.isnan(outcomes[0].nats_per_byte)
    text = heldout_of(open_trained(outcomes[0].run.run, tmp_path / "a"), tmp_path / "a")
    assert text.preference is not None
    found = measure(
        open_trained(outcomes[0].run.run, tmp_path / "a").on("cpu"),
        text.batches(text.num_windows),
        text.preference("cpu"),
    )
    assert found.loss == pytest.approx(outcomes[0].loss, rel=1e-4)
    assert found.preferred is not None
    assert found.preferred.accuracy == first.accuracy
    assert found.preferred.margin == pytest.approx(first.margin, rel=1e-3)
    assert found.preferred.kl == pytest.approx(first.kl, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": {"source": {"type": "preferences", "paths": ["p"]}}}, "Add \\[train.loss\\] with type"),
        ({"train.loss": {"type": "dpo"}}, "it is of pairs of answers"),
        (
            {
                "data": {"source": {"type": "preferences", "paths": ["p"]}},
                "train.loss": {"type": "orpo"},
                "stages": 2,
                "method": {"type": "ddp"},
            },
            "stages know no pairs",
        ),
    ],
)
def test_pairs_and_their_loss_go_together(changes: dict[str, Any], match: str) -> None:
    train = {"tokens": 1000, "schedule": {"type": "constant"}}
    if loss := changes.pop("train.loss", None):
        train["loss"] = loss
    with pytest.raises(ConfigError, match=match):
        from_tree({"name": "x", "train": train, **changes}, RunFile, where="run.toml")


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapter", "whole"])
@pytest.mark.parametrize("is_half", [True, False], ids=["bf16", "fp32"])
def test_whoever_has_the_model_fetches_none_of_its_weights(
    tmp_path: Path, adapter: NewAdapter | None, is_half: bool
) -> None:
    crew, home, vector = crew_of(tmp_path, adapter=adapter), Home(tmp_path / "joins"), initial_vector(MODEL, 5)
    vector = vector.bfloat16().float() if is_half else vector
    shutil.rmtree(tmp_path / "model")
    for folder in ("model", "its"):
        write_folder(tmp_path / folder, MODEL, vector, ByteTokenizer().to_json())
        (tmp_path / folder / "chat_template.jinja").write_text(CHATML)
    run = seal(crew.run_file, tmp_path, Home(tmp_path / "made"), lambda _event: None).config
    take_model(run, tmp_path / "its", home)
    wanted = run.base or run.initial
    assert home.blobs.open(wanted) == Home(tmp_path / "made").blobs.open(wanted)
    other = Home(tmp_path / "other")
    write_folder(tmp_path / "another", MODEL, initial_vector(MODEL, 4))
    with pytest.raises(ConfigError, match=r"--model .*another: its weights are not those that the run began with"):
        take_model(run, tmp_path / "another", other)
    assert other.blobs.open(wanted) is None


def test_a_run_from_a_seed_takes_no_folder(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, adapter=ADAPTER)
    run = seal(crew.run_file, tmp_path, Home(tmp_path / "made"), lambda _event: None).config
    seeded = replace(run, is_seeded=True)
    with pytest.raises(ConfigError, match="weights that weft makes from its seed"):
        take_model(seeded, tmp_path / "model", Home(tmp_path / "joins"))
