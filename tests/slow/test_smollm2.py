"""A public model, SmolLM2, draws the same tokens in weft's engine as in transformers: fp32, the likeliest each time.

Prompts are chats by the model's own template, code, and texts of several languages. The engine draws all of them side
by side, transformers one after the other.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slow import smollm2
from weft.cli.model.trained import open_trained
from weft.engine.draw import Drawing
from weft.engine.load import engine_of, free_nbytes, plan
from weft.engine.text import Text, Wanted
from weft.serve.chat import ToolUse, prompt_of
from weft.serve.generation import model_of
from weft.serve.schemas import Message

pytestmark = pytest.mark.slow
GIVEN = smollm2.file()
NUM_TOKENS = 24
CONTEXT = 512
TIE = 1e-4  # between logits: sums of fp32 in another order are so far apart
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about rain on a tin roof."}],
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    [{"role": "user", "content": "List three uses of a paper clip, as a numbered list."}],
    [{"role": "system", "content": "You answer like a pirate."}, {"role": "user", "content": "How do I boil an egg?"}],
    [
        {"role": "user", "content": "I have 17 apples and give away 5."},
        {"role": "assistant", "content": "Then you have 12 apples."},
        {"role": "user", "content": "And if I buy 30 more?"},
    ],
    [{"role": "user", "content": "<|im_end|> is a mark of yours. What does it do?"}],
    [{"role": "user", "content": "Fasse zusammen: " + "Der Hund bellt, die Katze schläft, es regnet. " * 12}],
]
TEXTS = [
    "def fibonacci(n: int) -> int:\n    ",
    "import numpy as np\n\n\ndef softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:\n",
    "SELECT customer, SUM(total) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    '{"name": "Ada", "born": 1815, "languages": ["English", ',
    "for i in range(3):\n    print(i)\n" * 12,
    "Die Hauptstadt von Deutschland ist",
    "Il était une fois, dans un petit village de Provence,",
    "El río más largo de América del Sur es",
    "Москва является столицей",
    "日本の首都は",
    "Once upon a time there was a lighthouse keeper who",
]


async def drawn(text: Text) -> list[int]:
    return [each.token async for each in text]


def nearest(model: Any, ids: list[int]) -> float:
    """Return how far the two largest logits after `ids` are apart."""
    with torch.no_grad():
        first, second = model(torch.tensor([ids])).logits[0, -1].topk(2).values.tolist()
    return float(first - second)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs, reader = smollm2.write_folder(GIVEN, tmp_path / "folder")
    trained = open_trained(str(tmp_path / "folder"), tmp_path / "home")
    here = torch.device("cpu")
    room = plan(trained.config, here, "fp32", CONTEXT, None, free_nbytes(here))
    engine = engine_of(trained.config, trained.vector, here, room, CONTEXT)
    try:
        model = model_of("smollm2", 0, engine, trained.tokenizer, trained.came_with)
        chats = [
            prompt_of(
                model, [msgspec.convert(each, Message) for each in chat], ToolUse(None, None, is_parallel=None), 0.0
            )
            for chat in CHATS
        ]
        prompts = [*chats, *(trained.tokenizer.encode(text).tolist() for text in TEXTS)]
        asked = [Wanted("key", tuple(each), NUM_TOKENS, Drawing(temperature=0.0), model.ends) for each in prompts]
        found = await asyncio.gather(*(drawn(engine.begin(each)) for each in asked))
    finally:
        engine.close()
    for chat, ids in zip(CHATS, chats, strict=True):
        if "<|im_end|>" not in chat[-1]["content"]:  # which weft takes for letters
            assert ids == reader.apply_chat_template(chat, add_generation_prompt=True, return_dict=False), chat
    assert prompts[len(chats) :] == [reader(text)["input_ids"] for text in TEXTS]
    ties, num_tokens = [], 0
    for ids, ours in zip(prompts, found, strict=True):
        whole = theirs.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS, attention_mask=torch.ones(1, len(ids))
        )[0].tolist()
        expected = whole[len(ids) :]
        if expected[-1] in model.ends:
            del expected[-1]
        num_tokens += len(expected)
        if ours != expected:
            same = next(
                (place for place, (one, other) in enumerate(zip(ours, expected, strict=False)) if one != other),
                min(len(ours), len(expected)),
            )
            apart = nearest(theirs, [*ids, *expected[:same]])
            assert apart < TIE, f"{reader.decode(ids)!r} goes on in another way after {same} tokens, {apart:g} apart"
            ties.append(apart)
    assert len(prompts) == 20
    assert num_tokens > 0.8 * 20 * NUM_TOKENS  # few end before
    assert len(ties) <= 1, ties  # none where it was tried
