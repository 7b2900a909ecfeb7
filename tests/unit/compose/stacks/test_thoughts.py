"""COCONUT against a slow version of its paper: what stands where, what is asked for, and a training by stages."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, batch, member, space, vector
from weft.clock import VirtualClock
from weft.compose.descent import DescentConfig
from weft.compose.shelf import Shelf
from weft.compose.space import Space
from weft.compose.stacks.body import body, vector_of
from weft.compose.stacks.thoughts import Curriculum, Marks, Staged, Thought, staged, thinking
from weft.compose.thinking import CONTROLS, Thinking, longest
from weft.errors import ConfigError
from weft.model.transformer import SectionModule

MARKS = Marks(begin=29, end=30, filler=31)
THOUGHT = Thought(question=(1, 2, 3), steps=((4, 5), (6,), (7, 8, 9)), answer=(10, 11))


def test_stage_after_stage_a_step_more_is_left_out() -> None:
    curriculum = Curriculum(latents_per_step=2, epochs_per_stage=3, num_stages=2)
    assert [curriculum.stage(epoch) for epoch in (0, 2, 3, 5, 6, 8, 9, 50)] == [0, 0, 1, 1, 2, 2, 3, 3]
    texts = [staged(curriculum, THOUGHT, stage, MARKS) for stage in range(4)]
    assert [each.tokens for each in texts] == [
        [1, 2, 3, 29, 30, 4, 5, 6, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 30, 6, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 31, 31, 30, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 31, 31, 30, 10, 11],
    ]
    assert texts[1].targets == [-100] * 6 + [6, 7, 8, 9, 10, 11, -100]
    assert [place for place, latent in enumerate(texts[1].is_latent) if latent] == [4, 5]
    for each in texts:
        assert len(each.tokens) == len(each.targets) == len(each.is_latent)
        assert sum(each.is_latent) == each.tokens.count(MARKS.filler)


@pytest.mark.parametrize(("is_padded", "num"), [(True, 6), (False, 2)])
def test_texts_with_few_steps_have_as_many_latents_if_asked_for(is_padded: bool, num: int) -> None:
    curriculum = Curriculum(latents_per_step=2, num_stages=3, is_padded=is_padded)
    short = Thought((1,), ((2, 3),), (4,))
    assert curriculum.left_out(4, 1) == (1, num)
    assert sum(staged(curriculum, short, 4, MARKS).is_latent) == num


def reference(ends: Space, module: SectionModule, tokens: list[int], is_latent: list[bool]) -> Tensor:
    """COCONUT's forward pass of one text, after section 3 of 2412.06769: position after position, nothing reused.

    At a latent position the input is the last hidden state of the position before it, elsewhere the token's embedding.
    """
    inputs = list[Tensor]()
    for token, latent in zip(tokens, is_latent, strict=True):
        if not latent:
            inputs.append(ends.embed[token])
            continue
        so_far = torch.stack(inputs)[None]
        hidden = module(so_far)[0, -1]
        inputs.append(hidden / (hidden.square().mean() + ends.norm_eps).sqrt())
    return module(torch.stack(inputs)[None])[0]


def test_thinking_is_that_of_the_paper_gradients_and_all() -> None:
    ends, curriculum = space(), Curriculum(latents_per_step=2, num_stages=2)
    texts = [staged(curriculum, THOUGHT, 2, MARKS), staged(curriculum, Thought((1,) * 6, ((4,),), (7, 8, 9)), 1, MARKS)]
    assert [sum(each.is_latent) for each in texts] == [4, 2]
    num = min(len(each.tokens) for each in texts)
    tokens, is_latent, targets = (
        torch.tensor([list(part)[:num] for part in kind]) for kind in zip(*texts, strict=True)
    )
    module = body(CONFIG, vector(1).double()).requires_grad_(True)
    mine = thinking(ends, module, tokens, is_latent)
    theirs = torch.stack(
        [reference(ends, module, row.tolist(), at.tolist()) for row, at in zip(tokens, is_latent, strict=True)]
    )
    assert torch.allclose(mine, theirs, atol=1e-4)
    plain = module(ends.begin(tokens))
    assert not torch.allclose(mine, plain, atol=1e-2)
    grads = [torch.autograd.grad(ends.loss(x, targets), list(module.parameters())) for x in (mine, theirs)]
    assert all((a - b).norm() < 1e-4 * b.norm() for a, b in zip(*grads, strict=True))


def test_without_latents_thinking_is_one_pass() -> None:
    ends, module, found = space(), member(1), batch()
    nowhere = torch.zeros_like(found.tokens, dtype=torch.bool)
    assert torch.equal(thinking(ends, module, found.tokens, nowhere), module(ends.begin(found.tokens)))


def test_a_text_that_begins_with_a_latent_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing came out before it"):
        thinking(space(), member(1), batch().tokens, torch.ones_like(batch().tokens, dtype=torch.bool))


TEXTS = (THOUGHT, Thought((1,) * 6, ((4,),), (7, 8, 9)), Thought((12, 13), ((14, 15, 16, 17), (18,), (19,)), (20,)))


def work(**changes: object) -> Thinking:
    asked = {
        "space": space(),
        "body": member(1),
        "texts": TEXTS,
        "marks": MARKS,
        "curriculum": Curriculum(latents_per_step=2, epochs_per_stage=2, num_stages=2),
        "lr": 1e-2,
        "batch_size": 4,
        "seed": 5,
    }
    return Thinking(**asked | changes)  # type: ignore[arg-type]


def asked_for(of: Thinking, module: SectionModule, stage: int, at: int) -> tuple[Tensor, Tensor]:
    """Return what came out where a text is asked for something, and what that is: by itself, without fillings."""
    text = staged(of.curriculum, of.texts[at], stage, MARKS)
    made, targets = reference(of.space, module, text.tokens, text.is_latent), torch.tensor(text.targets)
    return made[targets != -100], targets[targets != -100]


def slow_training(of: Thinking, *, is_reset: bool = True) -> Tensor:
    """COCONUT's training after section 3 of 2412.06769: text by text, and each stage with a new optimizer."""
    module, config = body(CONFIG, vector_of(of.body)).requires_grad_(True), DescentConfig(steps=1, warmup_steps=0)
    groups = [
        {"params": [each for each in module.parameters() if each.ndim == 2], "weight_decay": 0.01},
        {"params": [each for each in module.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    betas = config.optimizer.beta1, config.optimizer.beta2
    optimizer = torch.optim.AdamW(groups, of.lr, betas, config.optimizer.eps)
    for stage in range(of.curriculum.num_stages + 2):
        if is_reset:
            optimizer = torch.optim.AdamW(groups, of.lr, betas, config.optimizer.eps)
        for _ in range(of.curriculum.epochs_per_stage):
            optimizer.zero_grad()
            parts = [asked_for(of, module, stage, at) for at in range(len(of.texts))]
            losses = [cross_entropy(of.space.logits(made), targets, reduction="sum") for made, targets in parts]
            (torch.stack(losses).sum() / sum(len(targets) for _, targets in parts)).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
            optimizer.step()
    return vector_of(module).detach()


class Kept(Shelf):
    """A shelf that forgets."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), VirtualClock())

    def done(self, name: str) -> None:
        return None

    def put(self, name: str, numbers: dict[str, Tensor]) -> None:
        pass


def test_training_by_stages_is_that_of_the_paper() -> None:
    of, steps = work(lr=1e-4), list[None]()  # small steps: by large ones rounding leads elsewhere
    mine, theirs = of.make("thoughts", Kept(), lambda: steps.append(None)), slow_training(of)
    assert len(steps) == of.num_steps == 8
    moved = (theirs - vector_of(of.body)).norm()
    assert (mine - theirs).norm() < 1e-3 * moved
    others = [of.make(control, Kept(), lambda: None) for control in CONTROLS]
    for other in (*others, slow_training(of, is_reset=False)):
        assert (other - theirs).norm() > 1e-2 * moved


def test_an_epoch_reads_each_text_once_in_an_order_of_its_own() -> None:
    of, orders = work(batch_size=2), list[list[int]]()
    assert of.stages == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for stage, epoch in ((0, 0), (0, 1), (2, 0)):
        found = [of.draw("thoughts", stage)(2 * epoch + place) for place in range(2)]
        assert [len(each.is_latent) for each in found] == [2, 1]
        orders.append([int(token) for each in found for token in each.batch.tokens[:, 0]])
    firsts = [text.question[0] for text in TEXTS]
    orders += [
        [
            int(token)
            for place in range(2)
            for token in work(batch_size=2, seed=seed).draw("thoughts", 0)(place)[0][0][:, 0]
        ]
        for seed in range(8)
    ]
    assert all(sorted(each) == sorted(firsts) for each in orders)
    assert len({tuple(each) for each in orders}) > 1


def test_controls_have_pauses_or_nothing_where_thoughts_are() -> None:
    of = work()
    thoughts, pauses, nothing = (of.draw(filling, 2)(0) for filling in ("thoughts", *CONTROLS))
    assert torch.equal(thoughts.batch.tokens, pauses.batch.tokens)
    assert torch.equal(thoughts.batch.targets, pauses.batch.targets)
    assert int(thoughts.is_latent.sum()) == 3 * 4
    assert not pauses.is_latent.any()
    assert not nothing.is_latent.any()
    assert nothing.batch.tokens.shape[1] == thoughts.batch.tokens.shape[1] - 4
    wanted = sorted(each[each != -100].tolist() for each in thoughts.batch.targets)
    assert sorted(each[each != -100].tolist() for each in nothing.batch.targets) == wanted


def greedy(ends: Space, module: SectionModule, text: Staged, num: int) -> list[int]:
    """Return what a member writes after the question and its thoughts, one token after the other."""
    asked = text.targets.index(next(each for each in text.targets if each != -100)) + 1
    tokens, is_latent = list(text.tokens[:asked]), list(text.is_latent[:asked])
    for _ in range(num):
        logits = ends.logits(reference(ends, module, tokens, is_latent)[-1])
        tokens, is_latent = [*tokens, int(logits.argmax())], [*is_latent, False]
    return tokens[asked:]


def test_an_answer_is_right_where_greedy_drawing_writes_it() -> None:
    of = work(curriculum=Curriculum(latents_per_step=1, epochs_per_stage=20, num_stages=1))
    trained = of.make("thoughts", Kept(), lambda: None)
    seen = set[bool]()
    texts = (*TEXTS, Thought((21, 22), ((23,),), (24, 25)))  # the last one it has never seen
    for vector_then in (vector_of(of.body), trained):
        module, found = body(CONFIG, vector_then), of.told(vector_then, "thoughts", texts)
        for text, is_right, loss in zip(texts, found.are_right.tolist(), found.losses.tolist(), strict=True):
            laid = staged(of.curriculum, text, of.curriculum.last, MARKS)
            assert is_right == (greedy(of.space, module, laid, len(text.answer)) == list(text.answer))
            made, targets = reference(of.space, module, laid.tokens, laid.is_latent), torch.tensor(laid.targets)
            wanted = cross_entropy(of.space.logits(made)[targets != -100], targets[targets != -100])
            assert loss == pytest.approx(float(wanted), abs=1e-3)
            seen.add(is_right)
    assert seen == {False, True}


def test_what_is_read_and_computed_is_counted() -> None:
    of = work()
    laid = [[staged(of.curriculum, text, stage, MARKS) for text in TEXTS] for stage in range(4)]
    assert of.read("thoughts") == 2 * sum(len(each.tokens) for stage in laid for each in stage)
    passes = 0
    for each in (each for stage in laid for each in stage):
        places = [place for place, latent in enumerate(each.is_latent) if latent]
        passes += len(each.tokens) + sum(places)  # the pass that fills a place reads all before it
    assert of.tokens("thoughts") == 2 * passes
    assert of.tokens("pauses") == of.read("pauses") == of.read("thoughts")
    assert of.read("nothing") < of.read("pauses")
    assert of.flops("nothing") < of.flops("pauses") < of.flops("thoughts")
    assert max(len(each.tokens) for stage in laid for each in stage) == max(longest(of.curriculum, t) for t in TEXTS)
