"""Four peers go on with a Hugging Face folder, and hand one back."""

import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch

from unit.peer.crew import Crew
from weft.data.packing import JsonConfig
from weft.data.tokenizer import from_bytes
from weft.events import Evaluated
from weft.inference.sample import Sampling, generate
from weft.model.flat import assemble
from weft.model.weights import write_folder
from weft.peer.state.checkpoint import load_model
from weft.rng import stream
from weft.run.config import FolderModel

with warnings.catch_warnings():
    # Importing transformers sets off deprecations inside its own dependencies.
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers


@pytest.mark.full
async def test_four_peers_continue_a_folder_and_the_export_loads(tmp_path: Path) -> None:
    first = Crew(tmp_path, num_peers=1, num_rounds=30, train={"evaluate_every": 0})
    async with first.deadline():
        (begun,) = await first.done(first.found("maker"))
    run, blob, vector = load_model(begun.checkpoint)
    write_folder(tmp_path / "model", run.model, vector, from_bytes(blob).to_json())
    assert begun.loss is not None
    assert begun.loss < 5.0  # nats per token; ln 257 = 5.55 before it learnt anything

    crew = Crew(
        tmp_path,
        num_peers=4,
        num_rounds=5,
        model=FolderModel(path="model"),
        tokenizer=JsonConfig(path="model"),
        train={"evaluate_every": 1},
    )
    async with crew.deadline():
        members = [crew.found("a", wait_for=4), *(crew.join(name) for name in "bcd")]
        outcomes = await crew.done(*members)
    losses = [event.loss for event in members[0].seen(Evaluated)]
    assert losses[-1] < losses[0] < 5.0
    assert losses[-1] < begun.loss

    run, blob, vector = load_model(outcomes[3].checkpoint)
    tokenizer = from_bytes(blob)
    write_folder(tmp_path / "export", run.model, vector, tokenizer.to_json(), stop_id=tokenizer.end_of_text)
    ours = assemble(run.model, vector)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    prompt = torch.from_numpy(tokenizer.encode("def f1(x):").astype("int64"))[None]
    with torch.no_grad():
        assert torch.allclose(ours(prompt), theirs(prompt).logits, atol=1e-4)
    greedy = theirs.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    mine = list(islice(generate(ours, prompt[0].tolist(), Sampling(temperature=0.0), stream(0, "greedy")), 5))
    assert mine == greedy.tolist()[: len(mine)]
