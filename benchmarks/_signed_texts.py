"""Texts that sections compute in one process, with the receipts that their members would give; and those of cheats.

    stages = stages_of(config, vector, "bf16", 1)
    texts = play(stages, prompts, 32)
    findings = audited(stages_of(config, vector, "bf16", 1), texts[0], 0)

A cheat serves its stage with other numbers or fewer layers than its receipts name, tells a token that was not drawn, or
looks at another text's keys and values. It signs what it computes, and goes on with it.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft import rng
from weft.codec.dense import Bf16, Fp32
from weft.engine.draw import Drawing, Drawn
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import KeysAndValues, Weights
from weft.keys import Identity
from weft.model.config import ModelConfig
from weft.model.flat import cut, layout
from weft.model.sections import sections, whole
from weft.texts.messages import ReceiptTold
from weft.texts.receipts.audit import Finding, Told, audit, tokens_told
from weft.texts.receipts.receipt import ReceiptHeader, Signing, signed, weights_digest
from weft.texts.section import Done, Draw, Section, Work, packed

CPU = torch.device("cpu")
SIGNER = Identity.from_seed(bytes(range(32)))


class Cheat(NamedTuple):
    """
    Args:
        stage: whose member cheats.
        numbers: with which it computes in place of those that it names.
        share: of its layers that it computes.
        tells: "any" or "second": it tells another token once, any one, or the one that it found next likely. "written":
            it tells what was written before, whatever is drawn.
        swaps: whether it looks at a page of another text once the prompts are read.
    """

    stage: int = 0
    numbers: Kind | None = None
    share: float = 1.0
    tells: str = ""
    swaps: bool = False


HONEST = Cheat()


@dataclasses.dataclass(eq=False)
class SignedText:
    """
    Args:
        pages: at each stage.
        sent: rows that each stage sent on, by place.
        told: receipts of each stage.
    """

    tokens: list[int]
    num_prompt: int
    most: int
    drawing: Drawing
    pages: list[list[int]]
    headers: list[ReceiptHeader]
    sent: list[dict[int, bytes]]
    told: list[list[ReceiptTold]]
    signings: list[Signing] = dataclasses.field(default_factory=list)


def stages_of(
    config: ModelConfig, vector: Tensor, kind: Kind, num: int, room: int = 256, cheat: Cheat = HONEST
) -> list[Section]:
    """Return a model in `num` sections, each with `room` pages."""
    found = []
    for stage, part in enumerate(sections(config, num) if num > 1 else (whole(config),)):
        own = cut(config, vector, part) if num > 1 else vector
        table = None
        if config.is_tied and part.is_last and not part.is_first:
            spans = layout(config)
            (span,) = [each for each in spans if each.name == "embed.weight"]
            table = spans.view(vector, span)
        is_cheat = stage == cheat.stage
        computes = cheat.numbers if is_cheat and cheat.numbers is not None else kind
        weights = Weights(config, own, computes, part, table)
        if is_cheat:
            del weights.layers[max(1, int(cheat.share * len(weights.layers))) :]
        kept = KeysAndValues(config, room, CPU, computes, len(part.layers))
        vectors = (each.contiguous().numpy().view("u1").data for each in (own, table) if each is not None)
        section = Section(weights, kept, Fp32() if kind in ("exact", "fp32") else Bf16(), weights_digest(*vectors))
        section.kind = kind
        found.append(section)
    return found


def play(
    stages: Sequence[Section],
    prompts: Sequence[Sequence[int]],
    num: int,
    *,
    piece: int = 64,
    cheat: Cheat = HONEST,
    temperature: float = 0.8,
    seed: int = 0,
    written: Sequence[Sequence[int]] = (),
) -> list[SignedText]:
    """Draw `num` tokens of each text, all of them in each step.

    Args:
        piece: tokens of a prompt in one step.
        seed: of drawing, and of what a cheat does.
        written: answers that a cheat tells.
    """
    room = max(num_pages(len(prompt) + num) for prompt in prompts)
    draws = rng.stream(seed, "cheat")
    num_likeliest = 2 if cheat.tells == "second" else None
    drawings = [
        Drawing(temperature=temperature, seed=bytes([number % 256, seed % 256] * 16), num_likeliest=num_likeliest)
        for number in range(len(prompts))
    ]
    texts = [_begun(stages, prompt, number, room, num, drawings[number]) for number, prompt in enumerate(prompts)]
    cheated_at = draws.integers(1, num - 1, len(texts))
    for start in range(0, max(map(len, prompts)), piece):
        some = [text for text in texts if text.num_prompt > start]
        first = [answer[0] for answer, text in zip(written, texts, strict=True) if text in some] if written else []
        told = dict.fromkeys(range(len(first)), cheat.tells)
        _step(stages, some, [range(start, min(start + piece, text.num_prompt)) for text in some], told, first)
    if cheat.swaps:
        for one, other in zip(texts[::2], texts[1::2], strict=True):
            a, b = one.pages[cheat.stage], other.pages[cheat.stage]
            a[0], b[0] = b[0], a[0]
    for at in range(1, num):
        others = {}
        if written:
            others = dict.fromkeys(range(len(texts)), cheat.tells)
        elif cheat.tells:
            others = {number: cheat.tells for number, place in enumerate(cheated_at) if place == at}
        rows = [range(len(text.tokens) - 1, len(text.tokens)) for text in texts]
        tokens = [int(each) for each in draws.integers(0, stages[-1].vocab_size, len(texts))]
        _step(stages, texts, rows, others, [each[at] for each in written] or tokens)
    for text in texts:
        _sign(text, len(text.tokens) - 1)
    return texts


def _begun(
    stages: Sequence[Section], prompt: Sequence[int], number: int, room: int, num: int, drawing: Drawing
) -> SignedText:
    signings = []
    for stage, section in enumerate(stages):
        assert section.digest is not None
        header = ReceiptHeader(
            sequence=number.to_bytes(16, "big"),
            attempt=0,
            stage=stage,
            round=0,
            weights=section.digest,
            numbers=section.kind,
            inward=SIGNER.peer,
            onward=SIGNER.peer,
        )
        signings.append(Signing(header, section, 0, SIGNER))
    pages = [list(range(number * room, (number + 1) * room)) for _ in stages]
    nothing: list[dict[int, bytes]] = [{} for _ in stages]
    most = len(prompt) + num
    headers = [signing.header for signing in signings]
    told: list[list[ReceiptTold]] = [[] for _ in stages]
    return SignedText(list(prompt), len(prompt), most, drawing, pages, headers, nothing, told, signings)


def _step(
    stages: Sequence[Section],
    texts: Sequence[SignedText],
    rows: Sequence[range],
    others: dict[int, str] | None = None,
    any_token: Sequence[int] = (),
) -> None:
    """Compute rows of texts through all stages, and add the tokens that are drawn.

    Args:
        others: how a text's token is altered, by its number.
    """
    given = [packed(text.tokens[each.start : each.stop]) for text, each in zip(texts, rows, strict=True)]
    for stage, section in enumerate(stages):
        works = [
            Work(data, len(each), each.start, tuple(text.pages[stage]), _draw(section, text, each))
            for text, each, data in zip(texts, rows, given, strict=True)
        ]
        found = section.compute(works)
        for number, (text, work) in enumerate(zip(texts, works, strict=True)):
            done = found[number]
            assert done.failed is None
            if done.drawn:
                done = _altered(done, (others or {}).get(number, ""), any_token, number)
                text.tokens.append(done.drawn[0].token)
            for at in range(work.num if not section.is_last else 0):
                data = done.data[at * section.row_nbytes : (at + 1) * section.row_nbytes]
                text.sent[stage][work.start + at] = data
            text.signings[stage].computed(work, done, work.num)
            text.signings[stage].settled(work.start)
        given = [done.data for done in found]
    for text in texts:
        _sign(text)


def _draw(section: Section, text: SignedText, rows: range) -> Draw | None:
    is_drawn = section.is_last and rows.stop == len(text.tokens)
    return Draw(text.drawing, None, (), text.most) if is_drawn else None


def _altered(done: Done, how: str, any_token: Sequence[int], number: int) -> Done:
    (drawn,) = done.drawn
    if not how:
        return done
    if how == "written":
        return dataclasses.replace(done, drawn=(Drawn(any_token[number]),))
    other = any_token[number] if how == "any" else next(each for each, _ in drawn.likeliest if each != drawn.token)
    return dataclasses.replace(done, drawn=(Drawn(other if other != drawn.token else other ^ 1),))


def _sign(text: SignedText, until: int | None = None) -> None:
    for stage, signing in enumerate(text.signings):
        sent = text.sent[stage]
        for note in signing.notes(lambda place, sent=sent: sent[place], until):  # type: ignore[misc]
            text.told[stage] += note.receipts


def audited(section: Section, text: SignedText, stage: int, *, has_rows: bool = True) -> list[Finding]:
    """Audit a stage's receipts of a text.

    Args:
        section: honest, with pages of its own.
        has_rows: whether rows that were sent on are there to be looked at, too.
    """
    header = text.headers[stage]
    receipts = [signed(header, each, SIGNER.peer)[0] for each in text.told[stage]]
    stop = receipts[-1].stop
    given = packed(text.tokens[:stop]) if section.is_first else b"".join(text.sent[stage - 1][at] for at in range(stop))
    made = tokens_told(text.tokens, text.num_prompt) if section.is_last else text.sent[stage] if has_rows else {}
    return audit(section, header, receipts, Told(given, made, text.drawing))
