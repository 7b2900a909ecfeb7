"""Runs everything the shared path computes and prints one digest per stage. `test_exact` runs it on several settings.

    python exact_program.py NUM_THREADS DEVICE

Inputs are made of integers, so they are the same bits wherever this runs.
"""

import json
import sys

import numpy as np
import torch

from weft.codec.build import build
from weft.codec.config import (
    Bf16Config,
    CodecConfig,
    E3m0Config,
    Fp8Config,
    Fp32Config,
    Int2Config,
    Int4Config,
    Int8Config,
    NonzeroConfig,
    RandomKConfig,
    SignConfig,
    TopKConfig,
)
from weft.ids import Round
from weft.model.config import named
from weft.model.initial import initial_vector
from weft.rng import integers64, stream
from weft.sync.merge.mean import merge
from weft.sync.merge.method import OUTER, Method, Scope
from weft.sync.merge.outer import StepContext, norm
from weft.sync.merge.reduce import (
    Merger,
    Replies,
    codec_in,
    coding_in,
    decode_parts,
    encode_parts,
    encode_payload,
    reply_codec_in,
)
from weft.sync.method.choices import AdamWConfig, Choices, MultiKrumConfig, SgdConfig, TrimmedMeanConfig
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    CocktailConfig,
    DdpConfig,
    DeMoConfig,
    DiLoCoConfig,
    FedAvgConfig,
    MethodConfig,
    PowerSgdConfig,
    PulseConfig,
    SparseLoCoConfig,
    StreamingConfig,
    spell_out,
)
from weft.sync.method.schedule import CosineConfig, WsdConfig, lr
from weft.sync.records.parts import cut
from weft.wire import digest

NUM = (1 << 17) + 4096 + 77  # several chunks of every loop, enough for torch to start threads, and a short block
TOKENS = (512, 1024, 100)
CODECS: dict[str, CodecConfig] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "int8": Int8Config(),
    "int8/4096": Int8Config(block=4096),
    "fp8": Fp8Config(),
    "int4": Int4Config(),
    "e3m0": E3m0Config(),
    "int2": Int2Config(),
    "sign": SignConfig(),
    "top_k": TopKConfig(),
    "top_k 1000 int4": TopKConfig(kept=1000, values="int4"),
    "random_k": RandomKConfig(kept=410, largest=82, values="int4"),
    "nonzero": NonzeroConfig(),
}


def numbers(*name: str | int) -> torch.Tensor:
    """Return fp32 numbers over 60 binary orders of magnitude, of either sign."""
    words = integers64(stream(0, *name), NUM)
    exponents = (90 + words % 60).astype(np.uint32) << 23
    return torch.from_numpy((exponents | (words >> 32).astype(np.uint32) & 0x807FFFFF).view(np.float32))


def of(vector: torch.Tensor) -> str:
    return digest(vector.cpu().numpy().tobytes())[:16]


def codec_stages() -> dict[str, str]:
    stages = {}
    for name, config in CODECS.items():
        codec = build(config, round=3)
        data = codec.encode(numbers("codec"))
        stages[f"{name} encoded"] = digest(data)[:16]
        stages[f"{name} decoded"] = of(codec.decode(data, NUM))
    return stages


def rounds(config: MethodConfig, device: str, num_peers: int = 3) -> str:
    """Return the digest of the replicated state after three whole rounds."""
    method = Method(spell_out(config, num_peers), AdamWConfig(), ((200, 130), (64, 640), (77,)))
    outer = numbers("outer").to(device)
    state = method.init(NUM)
    state = {name: tensor.to(device) for name, tensor in state.items()}
    parts = cut(method.num_sent(NUM), [3, 1, 2])
    schedule = CosineConfig(lr=1e-2, warmup_tokens=2000, total_tokens=7000)
    for t in range(1, 4):
        payloads = []
        for peer in range(num_peers):
            local = (numbers("local", t, peer) * 2.0**-10).to(device)
            payloads.append(
                encode_parts(codec_in(method.choices, t), method.contribution(outer, local, state, t).cpu(), parts)
            )
        results = []
        for i, part in enumerate(parts):
            merger = Merger(len(part), coding_in(method.choices, t))
            for number, payload in enumerate(payloads):
                merger.add(TOKENS[number % len(TOKENS)], payload[i])
            results.append(merger.result().encoded)
        merged = decode_parts(reply_codec_in(method.choices, t), results, parts).to(device)
        rate = lr(schedule, t * sum(TOKENS))
        method.apply(outer, state, merged, StepContext(number=t, lr=rate, num_decayed=NUM // 2, max_norm=1e6, round=t))
    return of(torch.cat([outer, *state.values()]))


def rounds_with_errors(config: MethodConfig, device: str) -> str:
    """The same by the whole way of a payload: of fragments, with feedback of peers and of who merges."""
    method, num = Method(spell_out(config, 3), AdamWConfig()), NUM
    scope, outer = Scope(num, method.choices.fragments), numbers("outer").to(device)
    state = {name: tensor.to(device) for name, tensor in method.init(num).items()}
    errors = [torch.zeros(num) for _ in range(3)]
    replies, seen = Replies(scope), list[torch.Tensor]()
    for t in (1, 2, 1 + scope.fragments, 2 + scope.fragments):  # a fragment's second round starts from errors
        here = range(scope.num_sent(t))
        merger = Merger(len(here), coding_in(method.choices, t))
        for peer, tokens in enumerate(TOKENS):
            local = (numbers("local", t, peer) * 2.0**-10).to(device)
            delta = method.delta(outer, local).cpu()
            known = {OUTER: outer, **state}
            (encoded,), left = encode_payload(method, scope, known, delta, errors[peer], (here,), t)
            if left is not None:
                scope.put(errors[peer], t, left)
            merger.add(tokens, encoded)
        result = replies.encode(merger.merged(), here, Round(t), method.choices)
        replies.settle(Round(t), [result.digest])
        merged = reply_codec_in(method.choices, t).decode(result.encoded, len(here)).to(device)
        mine, parts = scope.take(outer, t), {name: scope.take(vector, t) for name, vector in state.items()}
        method.apply(mine, parts, merged, StepContext(number=t, round=t))
        scope.put(outer, t, mine)
        for name, vector in parts.items():
            scope.put(state[name], t, vector)
        seen.append(merged.cpu())
    return of(torch.cat([each.cpu() for each in (outer, *state.values(), *errors, *seen)]))


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    device = sys.argv[2]
    contributions = [(tokens, numbers("merge", i).to(device)) for i, tokens in enumerate(TOKENS)]
    custom = Choices(every=1, send="gradient", apply=SgdConfig(lr=0.3), codec=Fp32Config(), reply_codec=Bf16Config())
    stages = codec_stages() | {
        "merge": of(merge(contributions)),
        "norm": norm(contributions[0][1]).hex(),
        "initial": of(initial_vector(named("nano", 257, 64), seed=1)),
        "cosine": lr(CosineConfig(lr=3e-4, warmup_tokens=10, total_tokens=1000), 777).hex(),
        "wsd": lr(WsdConfig(lr=3e-4, warmup_tokens=10, decay_tokens=300, total_tokens=1000), 777).hex(),
        "ddp": rounds(DdpConfig(), device),
        "fedavg": rounds(FedAvgConfig(), device),
        "diloco": rounds(DiLoCoConfig(), device),
        "gradient, sgd": rounds(custom, device),
        "sparseloco": rounds(SparseLoCoConfig(), device),
        "demo": rounds(DeMoConfig(), device),
        "powersgd": rounds(PowerSgdConfig(), device),
        "powersgd by turns": rounds(PowerSgdConfig(factors="by_turns"), device),
        "async-diloco": rounds(AsyncDiLoCoConfig(delay=2), device),
        "streaming": rounds_with_errors(StreamingConfig(), device),
        "cocktail": rounds_with_errors(CocktailConfig(), device),
        "pulse": rounds_with_errors(PulseConfig(), device),
        "clipped_mean": rounds(DiLoCoConfig(merge="clipped_mean"), device, 7),
        "centered_clip": rounds(DiLoCoConfig(merge="centered_clip"), device, 7),
        "median": rounds(DiLoCoConfig(merge="median"), device, 7),
        "trimmed_mean": rounds(DiLoCoConfig(merge=TrimmedMeanConfig()), device, 7),
        "multi_krum": rounds(DiLoCoConfig(merge=MultiKrumConfig()), device, 7),
    }
    sys.stdout.write(json.dumps(stages))


main()
