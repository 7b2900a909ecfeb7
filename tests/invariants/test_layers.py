"""The shape of the source: who may import whom, and what only one file may do.

Reads the syntax trees of src/weft; imports nothing of it. Every rule is a function from a `Module` to the
complaints about it, and every rule is shown to fail on a sample that breaks it.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"

# The ground floor in order: each may import those before it.
GROUND = (
    *("lazy", "errors", "ids", "clock", "rng", "wire", "keys", "reading", "config"),
    *("extension", "events", "progress", "log", "tasks"),
)
# The rooms above it, floor by floor: each may import every lower floor, and nothing on its own but files of its own
# folder. What is listed under a longer name ("net.node", "sync.round") stands apart from the rest of its room.
FLOORS = (
    # leaves
    ("cost", "data", "ledger", "model", "net.messages", "web"),
    (
        "chat",
        "codec",
        "compose.member",
        "compose.space",
        "engine",
        "inference",
        "net.admission",
        "net.transport",
        "verify",
    ),
    # wires
    ("compose.registry", "net.link", "net.ticket"),
    ("net.blobs", "net.probe"),
    ("net.node",),
    ("net",),
    # the algorithms
    ("sync.method", "pipeline.codec"),
    ("sync.records", "pipeline"),
    ("verify.evidence",),
    ("sync.governance", "sync.merge", "pipeline.split", "texts"),
    ("sync.round", "pipeline.config"),
    ("sync",),
    # this machine
    ("peer.messages", "stages.messages", "store"),
    ("run", "peer.companion", "peer.chain", "stages.table"),
    ("training", "observe", "stages.report"),
    ("compose.descent",),
    ("compose.stacks", "compose.experts", "compose.paths", "compose.blocks"),
    ("compose",),
    ("texts.beside",),
    # a peer
    ("peer.context", "ranks"),
    ("peer.state",),
    ("peer.round",),
    ("peer.fork", "peer.group"),
    ("peer.audit",),
    ("peer.join", "peer.loop"),
    ("peer",),
    # around a peer
    ("anchor", "plan", "stages.reader", "dashboard", "serve"),
    ("launch", "dashboard.page", "serve.backend"),
    ("stages.step", "stages.gather"),
    ("stages", "library"),
    # played, and shown
    ("sim",),
    ("bench",),
    ("cli.terminal",),
    ("cli.screen",),
    ("cli",),
    ("cli.model", "cli.plan"),
    ("cli.own",),
    ("cli.run", "cli.doctor", "cli.chat", "cli.compose", "cli.serve"),
    ("cli.watch",),
    ("cli.demo",),
    ("cli.main",),
    ("__main__",),
    ("",),  # the package itself: it names what it looks up when that is asked for
)
RANK = {name: rank for rank, name in enumerate(GROUND)} | {
    name: len(GROUND) + floor for floor, names in enumerate(FLOORS) for name in names
}

MAX_LINES = 600
MAX_FILES = 15  # of a room, its `__init__` apart
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "lib"}
SERIALIZERS_THAT_RUN_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
GENERATOR_MODULES = {"random", "secrets", "uuid"}
TORCH_DRAWS = {
    "Generator",
    "manual_seed",
    "seed",
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name below `weft` ("net.tls", "" for weft itself), its text and its tree."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """Return the longest name of a floor that this module is in; its first word, where it is in none."""
        return room_of(self.name)

    @property
    def folder(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


@cache
def room_of(name: str) -> str:
    parts = name.split(".")
    listed = (".".join(parts[:num]) for num in range(len(parts), 0, -1))
    return next((room for room in listed if room in RANK), parts[0])


def parse(name: str, text: str, *, is_package: bool = False) -> Module:
    return Module(name, is_package, text, ast.parse(text))


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(
            parse(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package=is_package)
        )
    return tuple(found)


def imports(module: Module) -> Iterator[str]:
    """Yield the absolute dotted name of everything imported, wherever in the file: for `from a import b`, "a.b"."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["weft", *module.name.split(".")] if module.name else ["weft"]
                parents = here[: len(here) - node.level + (1 if module.is_package else 0)]
                base = ".".join([*parents, base]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """Return "a.b.c" for the expression a.b.c, with "?" where it is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def calls(module: Module) -> Iterator[ast.Call]:
    yield from (node for node in module.nodes if isinstance(node, ast.Call))


# --- the rules ---


@cache
def files() -> frozenset[str]:
    return frozenset(module.name for module in modules() if not module.is_package)


def is_beside(module: Module, target: str) -> bool:
    """Whether `target`, a module or a name in one, lies in the folder of `module`."""
    held = target if target in files() else target.rpartition(".")[0]
    return bool(module.folder) and held.rpartition(".")[0] == module.folder


def imports_only_downward(module: Module) -> list[str]:
    complaints = []
    for name in imports(module):
        if name.split(".")[0] != "weft":
            continue
        target = name.removeprefix("weft").removeprefix(".")
        room = room_of(target)
        if room in ("", "__version__") or room == module.room or is_beside(module, target):
            continue
        if room not in RANK:
            complaints.append(f"imports weft.{room}, which is in no floor of this test")
        elif module.room not in RANK:
            complaints.append(f"is in no floor of this test and imports weft.{target}")
        elif RANK[room] >= RANK[module.room]:
            where = "sideways" if RANK[room] == RANK[module.room] else "upward"
            complaints.append(f"imports {where}: weft.{target}")
    return complaints


def reads_no_environment(module: Module) -> list[str]:
    if module.name.split(".")[0] == "cli" or module.name == "library.home":
        return []
    named = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    found = [name for name in imports(module) if name in named or name.split(".")[0] == "platformdirs"]
    found += [dotted(node) for node in module.nodes if isinstance(node, ast.Attribute) and dotted(node) in named]
    found += [
        call.func.attr
        for call in calls(module)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("expanduser", "expandvars")
    ]
    found += [dotted(call.func) for call in calls(module) if dotted(call.func) == "Path.home"]
    return [f"reads the environment ({name}); only cli/ may" for name in found]


def reads_no_time(module: Module) -> list[str]:
    if module.name == "clock":
        return []
    found = [name for name in imports(module) if name.split(".")[0] == "time"]
    # A fixed date is no reading of the time; "now" is.
    found += [
        dotted(call.func)
        for call in calls(module)
        if dotted(call.func).endswith((".now", ".utcnow", ".today")) and "date" in dotted(call.func)
    ]
    return [f"reads time ({name}); only clock.py may" for name in found]


def makes_no_generator(module: Module) -> list[str]:
    if module.name == "rng":
        return []
    found = [name for name in imports(module) if name.split(".")[0] in GENERATOR_MODULES]
    found += [name for name in imports(module) if name.startswith("numpy.random") and name != "numpy.random.Generator"]
    for call in calls(module):
        name = dotted(call.func)
        if name.startswith(("np.random.", "numpy.random.")) or name == "os.urandom":
            found.append(name)
        if name.startswith("torch.") and name.rsplit(".", 1)[-1] in TORCH_DRAWS:
            found.append(name)
    return [f"makes random numbers ({name}); only rng.py may" for name in found]


def runs_no_foreign_code(module: Module) -> list[str]:
    found = [name for name in imports(module) if name.split(".")[0] in SERIALIZERS_THAT_RUN_CODE]
    found += [name for name in imports(module) if name in ("torch.load", "torch.save")]
    for call in calls(module):
        name = dotted(call.func)
        if name in ("eval", "exec", "compile", "__import__", "torch.load", "torch.save", "yaml.load"):
            found.append(name)
        if any(keyword.arg == "allow_pickle" for keyword in call.keywords):
            found.append(f"{name}(allow_pickle=...)")
    return [f"could run what a peer sent ({name})" for name in found]


def says_what_it_is(module: Module) -> list[str]:
    docstring = ast.get_docstring(module.tree) or ""
    return [] if len(docstring.split()) >= 4 else [f"has no docstring that says what it is (found {docstring!r})"]


def is_short(module: Module) -> list[str]:
    num_lines = sum(1 for line in module.text.splitlines() if line.strip())
    return [f"has {num_lines} lines that are not blank; at most {MAX_LINES}"] if num_lines > MAX_LINES else []


def package_file_only_reexports(module: Module) -> list[str]:
    if not module.is_package:
        return []
    complaints = []
    for node in module.tree.body[1:]:
        is_name = isinstance(node, ast.Assign) and all(
            dotted(target) in ("__all__", "__version__") for target in node.targets
        )
        if not is_name and not isinstance(node, ast.Import | ast.ImportFrom):
            complaints.append(f"line {node.lineno}: __init__.py holds more than a docstring and re-exports")
    return complaints


def does_nothing_when_imported(module: Module) -> list[str]:
    acting = (ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Delete, ast.Raise, ast.Assert)
    complaints = [f"line {node.lineno}: acts when imported" for node in module.tree.body if isinstance(node, acting)]
    complaints += [
        f"line {node.lineno}: acts when imported"
        for node in module.tree.body
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ]
    complaints += [f"line {node.lineno}: changes module state" for node in module.nodes if isinstance(node, ast.Global)]
    return complaints


def is_named_after_a_concept(module: Module) -> list[str]:
    return [f"{part!r} names no concept" for part in module.name.split(".") if part in FORBIDDEN_NAMES]


RULES: tuple[Callable[[Module], list[str]], ...] = (
    imports_only_downward,
    reads_no_environment,
    reads_no_time,
    makes_no_generator,
    runs_no_foreign_code,
    says_what_it_is,
    is_short,
    package_file_only_reexports,
    does_nothing_when_imported,
    is_named_after_a_concept,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Module], list[str]]) -> None:
    complaints = [f"weft.{module.name or '__init__'} {complaint}" for module in modules() for complaint in rule(module)]
    assert not complaints, "\n".join(["", *complaints])


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves through others."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack.extend(graph.get(name, ()))
        return seen

    return sorted(name for name in graph if name in reach(name))


def import_graph(found: Sequence[Module]) -> dict[str, set[str]]:
    """Return which modules each module imports. A package's `__init__` re-exports, so it counts only as itself."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        targets = {name.removeprefix("weft.") for name in imports(module) if name.startswith("weft.")}
        resolved = {name if name in names else name.rpartition(".")[0] for name in targets}
        graph[module.name] = {name for name in resolved if name in names and name}
    return graph


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(import_graph(modules())) == []


def folder_graph(found: Sequence[Module]) -> dict[str, set[str]]:
    """Return which rooms each room imports: folders, and files that lie beside folders, each by itself."""
    folders = {module.folder for module in found}
    mixed = {folder.rpartition(".")[0] for folder in folders if folder}

    def room(name: str) -> str:
        folder = name.rpartition(".")[0]
        return name if folder in mixed else folder

    graph: dict[str, set[str]] = {}
    packages = {module.name for module in found if module.is_package}
    for name, targets in import_graph(found).items():
        if name not in packages:
            here = graph.setdefault(room(name), set())
            here |= {room(target) for target in targets if target not in packages} - {room(name)}
    return graph


def test_no_room_imports_itself_through_others() -> None:
    assert cycles(folder_graph(modules())) == []


def num_files(found: Sequence[Module]) -> dict[str, int]:
    return Counter(module.folder for module in found if not module.is_package)


def test_no_room_has_more_files_than_a_reader_can_hold() -> None:
    assert {room: num for room, num in num_files(modules()).items() if num > MAX_FILES} == {}


def record_names(module: Module) -> list[str]:
    """Return the classes of a module that derive from `Record` by name: those that may be signed."""
    return [
        node.name
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and any(dotted(base).split(".")[-1] == "Record" for base in node.bases)
    ]


def test_no_two_records_share_a_name() -> None:
    """A signature covers the record's class name, so a name used twice would let one record pass as another."""
    seen: dict[str, str] = {}
    for module in modules():
        for name in record_names(module):
            assert name not in seen, f"{name} is a record of weft.{module.name} and of weft.{seen[name]}"
            seen[name] = module.name
    assert "Signed" in seen


def test_the_source_is_found() -> None:
    found = {module.name for module in modules()}
    assert {"", *GROUND, "net.transport.tls"} <= found


# --- every rule can fail ---

DOC = '"""A sample that says what it is."""\n'


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (imports_only_downward, "model.layers", "from weft.net import node"),
        (imports_only_downward, "model.layers", "from weft.codec.dense import Dense"),
        (imports_only_downward, "model.layers", "import weft.data.store"),
        (imports_only_downward, "model.layers", "from ..codec import dense"),
        (imports_only_downward, "model.layers", "def f():\n    from weft.peer import peer"),
        (imports_only_downward, "model.layers", "from weft import cost"),
        (imports_only_downward, "ids", "from weft.wire import encode"),
        (imports_only_downward, "plan.forecast", "from weft.library import sync"),
        (imports_only_downward, "model.layers", "from weft.attic import box"),
        (imports_only_downward, "attic.box", "from weft.wire import encode"),
        (reads_no_environment, "peer.peer", "import os\nhome = os.environ['HOME']"),
        (reads_no_environment, "peer.peer", "from os import getenv"),
        (reads_no_environment, "peer.peer", "import os\nhome = os.getenv('HOME')"),
        (reads_no_environment, "peer.peer", "import platformdirs"),
        (reads_no_environment, "peer.peer", "from pathlib import Path\nhome = Path.home()"),
        (reads_no_environment, "peer.peer", "def f(p):\n    return p.expanduser()"),
        (reads_no_time, "net.rpc", "import time"),
        (reads_no_time, "net.rpc", "from time import monotonic"),
        (reads_no_time, "net.rpc", "import datetime as d\nx = d.date.today()"),
        (reads_no_time, "net.rpc", "from datetime import datetime\nx = datetime.now()"),
        (makes_no_generator, "data.assign", "import random"),
        (makes_no_generator, "data.assign", "from secrets import token_bytes"),
        (makes_no_generator, "data.assign", "from numpy.random import default_rng"),
        (makes_no_generator, "data.assign", "import numpy as np\ng = np.random.default_rng(0)"),
        (makes_no_generator, "data.assign", "import torch\nx = torch.randn(3)"),
        (makes_no_generator, "data.assign", "import torch\nx = torch.Generator()"),
        (makes_no_generator, "data.assign", "import os\nx = os.urandom(3)"),
        (runs_no_foreign_code, "net.frame", "import pickle"),
        (runs_no_foreign_code, "net.frame", "from cloudpickle import loads"),
        (runs_no_foreign_code, "net.frame", "import torch\nx = torch.load('a')"),
        (runs_no_foreign_code, "net.frame", "from torch import load"),
        (runs_no_foreign_code, "net.frame", "x = eval('1')"),
        (runs_no_foreign_code, "net.frame", "exec('x = 1')"),
        (runs_no_foreign_code, "net.frame", "import numpy as np\nx = np.load('a', allow_pickle=True)"),
        (is_short, "net.frame", "x = 1\n" * MAX_LINES),
        (does_nothing_when_imported, "net.frame", "print('hello')"),
        (does_nothing_when_imported, "net.frame", "for i in range(3):\n    pass"),
        (does_nothing_when_imported, "net.frame", "count = 0\ndef f():\n    global count"),
        (is_named_after_a_concept, "net.utils", ""),
        (is_named_after_a_concept, "helpers.text", ""),
    ],
)
def test_the_rule_finds_the_fault(rule: Callable[[Module], list[str]], name: str, text: str) -> None:
    assert rule(parse(name, DOC + text)), text


@pytest.mark.parametrize("text", ["", '"""Room."""', "x = 1"])
def test_a_module_that_says_nothing_is_found(text: str) -> None:
    assert says_what_it_is(parse("net.frame", text))


@pytest.mark.parametrize("text", ["x = 1", "def f(): ...", "if True:\n    import os"])
def test_a_package_file_that_does_more_is_found(text: str) -> None:
    assert package_file_only_reexports(parse("net", DOC + text, is_package=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("peer.peer", "from weft.sync import round\nfrom weft.model import config\nfrom weft.wire import encode"),
        ("sync.round", "from weft.sync.records.messages import Ready\nfrom . import method"),
        ("cli.main", "import os\nhome = os.environ['HOME']"),
        ("clock", "import time\nnow = time.monotonic"),
        ("net.tls", "import datetime\nepoch = datetime.datetime(1970, 1, 1)\ndef f(clock):\n    return clock.now()"),
        ("rng", "import secrets\nimport numpy as np\ndef f():\n    return np.random.Philox(key=1)"),
        ("data.assign", "import numpy as np\ndef f(g: np.random.Generator) -> int:\n    return int(g.integers(3))"),
        ("model.transformer", "import torch\ndef f(model: torch.nn.Module) -> None:\n    model.eval()"),
    ],
)
def test_what_is_allowed_is_not_complained_about(name: str, text: str) -> None:
    module = parse(name, DOC + text)
    assert [complaint for rule in RULES for complaint in rule(module)] == []


def test_a_cycle_is_found() -> None:
    sample = [
        parse("net.a", "from weft.net.b import f"),
        parse("net.b", "import weft.net.c"),
        parse("net.c", "from .a import g"),
    ]
    assert cycles(import_graph(sample)) == ["net.a", "net.b", "net.c"]
    assert cycles(import_graph(sample[:2])) == []


def test_a_cycle_of_rooms_is_found() -> None:
    sample = [
        parse("net.link.a", "from weft.net.blobs.b import f"),
        parse("net.blobs.b", "x = 1"),
        parse("net.blobs.c", "from weft.net.node import g"),
        parse("net.node", "from weft.net.link.a import h"),
    ]
    assert cycles(import_graph(sample)) == []
    assert cycles(folder_graph(sample)) == ["net.blobs", "net.link", "net.node"]
    assert cycles(folder_graph(sample[:3])) == []


def test_a_crowded_room_is_found() -> None:
    sample = [parse(f"net.m{num}", "x = 1") for num in range(MAX_FILES + 1)]
    assert num_files(sample) == {"net": MAX_FILES + 1}


def test_a_record_is_found() -> None:
    assert record_names(parse("net.a", "class Hello(wire.Record, frozen=True): ...\nclass No: ...")) == ["Hello"]
