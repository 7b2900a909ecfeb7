"""Numbers that must be exact: what the shared path may compute with, and that it computes the same bits on any setting.

The shared path is what all members compute alike: first weights, codecs, merging, outer steps, and the rates they use.
First its source is read: every call into torch, numpy and math, and every method call, must be on a list of operations
that round each element once or not at all. Then it is run under other instruction sets and thread counts.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src" / "weft"
SHARED_PATH = (
    "codec/blocks.py",
    "codec/bounds.py",
    "codec/build.py",
    "codec/codec.py",
    "codec/config.py",
    "codec/dense.py",
    "codec/exact.py",
    "codec/extension.py",
    "codec/minifloat.py",
    "codec/pieces.py",
    "codec/quantize.py",
    "codec/sign.py",
    "codec/sparse/elias_fano.py",
    "codec/sparse/kept.py",
    "codec/sparse/nonzero.py",
    "codec/sparse/rank.py",
    "model/initial.py",
    "sync/merge/low_rank.py",
    "sync/merge/mean.py",
    "sync/merge/method.py",
    "sync/merge/outer.py",
    "sync/merge/reduce.py",
    "sync/merge/robust.py",
    "sync/method/schedule.py",
)

# Each name is here for one of these reasons; a new one needs a reason too.
ALLOWED_FUNCTIONS = {
    # one correctly rounded operation per element (IEEE 754)
    *("torch.mul", "torch.sub", "torch.div", "torch.round", "np.sqrt", "math.sqrt"),
    "torch.sqrt",  # on a GPU alone: on a CPU it is MKL's, which rounds wrongly on some (test_outer tells)
    # exact: signs, comparisons, maxima, bits
    *("torch.abs", "torch.where", "torch.equal", "torch.aminmax", "torch.bitwise_right_shift", "np.where"),
    *("torch.sign", "torch.frexp", "torch.bitwise_left_shift", "torch.bitwise_and"),
    *("np.isfinite", "np.left_shift", "np.abs", "np.minimum", "np.array_equal", "math.prod", "math.comb", "math.ldexp"),
    *("np.packbits", "np.unpackbits", "np.nonzero", "np.flatnonzero", "np.count_nonzero", "np.searchsorted"),
    # exact where they are given integers, as they are here: places, keys and counts
    *("np.add.reduce", "np.cumsum", "np.partition", "np.sort", "np.argsort", "np.unique", "np.maximum"),
    *("np.repeat", "np.bincount"),
    # memory, and conversions that round once
    *("torch.empty", "torch.empty_like", "torch.zeros", "torch.zeros_like", "torch.tensor", "torch.from_numpy"),
    *("np.empty", "np.copyto", "np.frombuffer", "np.float32", "np.float64", "np.int32", "np.uint32", "np.uint64"),
    *("np.array", "np.zeros", "np.ones", "np.full", "np.arange", "np.concatenate", "np.broadcast_to", "np.dtype"),
    *("np.take", "np.take_along_axis", "np.put_along_axis", "torch.index_select", "torch.cat"),
    "torch.argsort",  # a stable one: of equal elements the order is that of contributors
}
ALLOWED_METHODS = {
    # one correctly rounded operation per element
    *("add_", "sub_", "mul_"),
    # exact
    *(
        "round_",
        "abs",
        "amax",
        "min",
        "max",
        "clamp",
        "clamp_",
        "bitwise_and_",
        "bitwise_or_",
        "bitwise_right_shift_",
        "all",
        "any",
    ),
    # memory, shapes, and conversions that round once
    *("copy_", "zero_", "astype", "numpy", "view", "unsqueeze", "detach", "new_empty", "new_zeros", "numel", "dim"),
    *("double", "float", "long", "expand", "transpose", "clone", "contiguous"),
    *("is_contiguous", "scatter_", "cast", "reshape", "copy", "bit_length", "to_bytes", "tobytes", "tolist", "cpu"),
    # no numbers
    *(
        "append",
        "get",
        "pop",
        "data_ptr",
        "values",
        "endswith",
        "fromhex",
        "join",
        "format",
        "items",
        "isidentifier",
        "isascii",
    ),
    # of an outer step from outside, whose author sees to it
    *("init", "apply"),
    # our own: their arithmetic is in the files read here
    *("encode", "decode", "nbytes", "_empty", "_decode", "_accumulate", "_split", "_pieces", "_bytes_of", "_places"),
    *("quantize", "spread", "factors", "last_up_to", "merged", "add", "add_legacy", "result"),
    *("_add_to", "_sum", "_factors", "_center", "_apart", "_trim", "_zeros", "_copied", "_scaled"),
    *("forward", "inverse", "_moved", "_pairs", "_transformed", "_has_p", "_has_q", "_left", "_right", "num_sent"),
    *(
        "_num_after",
        "length",
        "_nbytes",
        "_most",
        "_chunks",
        "_encoded",
        "sections",
        "read",
        "write",
        "room",
        "num_kept",
        "_num_of",
    ),
    *("take", "put", "fragment", "of_mean", "advance", "delta", "step"),
    *("to_bits", "to_places", "_to_bits", "_to_places", "to_counts", "_named", "_where", "_most_bits", "up_to"),
}
ALLOWED_MODULES = {
    "bounds",
    "mean",
    "optimizers",
    "pieces",
    "rank",
    "msgspec",
}  # whose functions may be called: read here, or no arithmetic
# Builtins whose floats depend on the version (sum compensates from 3.12 on) or on the C library.
FORBIDDEN_BUILTINS = {"sum", "pow", "divmod", "round"}
ALLOWED_SUMS = {  # integers
    "sum(shares)",
    "sum(self._weights)",
    "sum((self._weights[number] for number in kept))",
    "sum(weights)",
    "sum(shape)",
    "sum((_TILE * math.prod(_tiles(shape)) for shape in self._shapes))",
    "sum((len(here) for here in self._pieces(num)))",
    "sum(map(len, self._whole))",
    "sum(self.sections(num))",
    "sum(sizes[:number])",
    "sum((size.most for size in sizes))",
    "sum((piece.stop - piece.start for piece in self._pieces[self.fragment(round)]))",
}
ALLOWED_PRODUCTS = {"left @ right"}  # of integers, with sums that float64 holds (codec/exact.py)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def full_names(tree: ast.Module) -> dict[str, str]:
    """Return what imported names stand for: `from math import sqrt` makes sqrt mean math.sqrt."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def complaints(text: str) -> list[str]:
    """Return every place in a source text that could give other bits on another machine."""
    tree = ast.parse(text)
    names = full_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [f"line {node.lineno}: {what}" for what in call_complaints(node, names)]
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult | ast.Pow):
            if ast.unparse(node) in ALLOWED_PRODUCTS:
                continue
            found.append(f"line {node.lineno}: operator {'@' if isinstance(node.op, ast.MatMult) else '**'}")
    return found


def call_complaints(call: ast.Call, names: dict[str, str]) -> list[str]:
    found = [f"{keyword.arg}= fuses a multiplication" for keyword in call.keywords if keyword.arg in ("alpha", "value")]
    name = dotted(call.func)
    first, _, rest = name.partition(".")
    full = ".".join(filter(None, [names.get(first, first), rest])).replace("numpy.", "np.")
    if full.split(".")[0] in ("torch", "np", "math"):
        if full not in ALLOWED_FUNCTIONS:
            found.append(full)
        if full == "torch.div" and isinstance(call.args[1], ast.Constant):
            found.append("torch.div by a number: a GPU multiplies by its rounded reciprocal")
    elif isinstance(call.func, ast.Attribute):
        if call.func.attr not in ALLOWED_METHODS and first not in ALLOWED_MODULES:
            found.append(f"method {call.func.attr}")
    elif name in FORBIDDEN_BUILTINS and ast.unparse(call) not in ALLOWED_SUMS:
        found.append(f"builtin {name}")
    return found


@pytest.mark.parametrize("path", SHARED_PATH)
def test_shared_path_uses_only_operations_that_are_exact(path: str) -> None:
    assert complaints((SOURCE / path).read_text("utf-8")) == []


def test_every_codec_is_on_the_shared_path() -> None:
    codecs = {f"codec/{path.name}" for path in (SOURCE / "codec").glob("*.py")} - {"codec/__init__.py"}
    assert codecs <= set(SHARED_PATH)


@pytest.mark.parametrize(
    "text",
    [
        "x.addcmul_(m, g)",
        "x.addcdiv_(m, v)",
        "torch.addcmul(x, m, g)",
        "x.lerp_(g, 0.1)",
        "x.add_(g, alpha=0.1)",
        "x.sub_(g, alpha=lr)",
        "torch.add(x, g, alpha=2)",
        "torch.mul(x, m, value=2)",
        "x.mean()",
        "x.sum()",
        "x.norm()",
        "torch.linalg.vector_norm(x)",
        "torch.sum(x)",
        "np.mean(x)",
        "x.rsqrt_()",
        "torch.rsqrt(x)",
        "torch.exp(x)",
        "x.pow(2)",
        "x @ y",
        "x ** 2",
        "x **= 2",
        "torch.matmul(x, y)",
        "x.dot(y)",
        "torch.randn(4)",
        "torch.optim.AdamW(x)",
        "torch._foreach_add_(x, y)",
        "import torch.nn.functional as F\nF.softmax(x)",
        "from torch import addcmul\naddcmul(x, m, g)",
        "from torch.optim import SGD\nSGD(x)",
        "import numpy\nnumpy.dot(x, y)",
        "from math import cos\ncos(x)",
        "import math as m\nm.exp(1.0)",
        "math.fsum(x)",
        "sum(x)",
        "pow(x, 2)",
        "round(x)",
        "torch.div(x, 127)",
        "x.div_(127)",
        "x.to(torch.bfloat16)",
        "x.cumsum(0)",
    ],
)
def test_the_reading_finds_each_way_to_differ(text: str) -> None:
    assert complaints(text)


@pytest.mark.parametrize(
    "text",
    ["torch.mul(g, lr, out=scratch)", "m.add_(g)", "x = (a + b) * c - d / e", "shares = [1]\ntotal = sum(shares)"],
)
def test_the_reading_lets_exact_operations_pass(text: str) -> None:
    assert complaints(text) == []


# Regenerated only on purpose: other digests mean that new and old peers cannot train one run together.
GOLDEN = {
    "fp32 encoded": "f68095492f6e8c48",
    "fp32 decoded": "f68095492f6e8c48",
    "bf16 encoded": "e22a95b7aa13bd78",
    "bf16 decoded": "dca6ab42082fca09",
    "int8 encoded": "a837dd003464fc49",
    "int8 decoded": "1464c52064537d5a",
    "int8/4096 encoded": "2057a4c69577f69d",
    "int8/4096 decoded": "71e0e715dd8d7220",
    "fp8 encoded": "3e685460128edeb9",
    "fp8 decoded": "6c8f9ce0f2dc8854",
    "int4 encoded": "380b24be9c7e2e0a",
    "int4 decoded": "3f925d37fc2d8fbb",
    "e3m0 encoded": "9323b678f2f67ec6",
    "e3m0 decoded": "6ae989bfdc51e85b",
    "int2 encoded": "c2b578ab9304f5f0",
    "int2 decoded": "0171aa38cce6614c",
    "sign encoded": "78925a822d8432ef",
    "sign decoded": "22edf531028db23d",
    "top_k encoded": "8284c80404485b8e",
    "top_k decoded": "a984d5b0d3cf96ff",
    "top_k 1000 int4 encoded": "33e2ee6139dd72a0",
    "top_k 1000 int4 decoded": "1ae9eedbba4e7515",
    "random_k encoded": "c804ad967d97eeb7",
    "random_k decoded": "cb4c0df219f653e3",
    "nonzero encoded": "daf66da058e08232",
    "nonzero decoded": "dca6ab42082fca09",
    "merge": "dc14a9aed162f351",
    "norm": "0x1.51b2297d52c3ap+28",
    "initial": "a1059425a52de8a6",
    "cosine": "0x1.05c95cd233930p-14",
    "wsd": "0x1.d3aa369fcf3dcp-13",
    "ddp": "393a77e0ba4886c0",
    "fedavg": "3f7b8f5538c70623",
    "diloco": "a75b4f22c4139218",
    "gradient, sgd": "6ad488649930e9e2",
    "sparseloco": "19b8e6bd494bee1c",
    "demo": "910ec25770fe33ce",
    "powersgd": "9244892e826db37e",
    "powersgd by turns": "0747f53dcb4f57eb",
    "async-diloco": "080556f77b53b121",
    "streaming": "15b400b8912b44c9",
    "cocktail": "8831cc02994357d0",
    "pulse": "a92d807bc751b456",
    "clipped_mean": "172308412a34ac25",
    "centered_clip": "b0877f123fa34a93",
    "median": "914afcaec55b5353",
    "trimmed_mean": "bcc68b7dd17b479a",
    "multi_krum": "c8a172c44d1db36d",
}


def run_program(num_threads: int, capability: str | None, device: str = "cpu") -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    # Passive: threads that wait must not take the cores that others compute on.
    environment |= {"PYTHONPATH": str(SOURCE.parent), "OMP_WAIT_POLICY": "passive"} | (
        {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    )
    program = Path(__file__).with_name("exact_program.py")
    done = subprocess.run(
        [sys.executable, str(program), str(num_threads), device],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("num_threads", "capability"),
    [
        # "default" is the baseline without AVX; None is the widest this machine has: AVX-512 where it does.
        pytest.param(1, "default", marks=pytest.mark.full),
        pytest.param(2, "avx2", marks=pytest.mark.slow),
        (2, None),
    ],
)
def test_whole_rounds_give_the_same_digests_on_every_setting(num_threads: int, capability: str | None) -> None:
    assert run_program(num_threads, capability) == GOLDEN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: outer steps and merging were not run on one")
def test_whole_rounds_give_the_same_digests_on_a_gpu() -> None:
    assert run_program(1, None, "cuda") == GOLDEN
