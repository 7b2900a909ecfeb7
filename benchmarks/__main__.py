"""Run the benchmarks, all or those named: `python -m benchmarks step`."""

import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NO_BENCHMARKS = {"__init__", "__main__", "report"}


def names() -> list[str]:
    return sorted(
        path.stem for path in HERE.glob("*.py") if path.stem not in NO_BENCHMARKS and not path.stem.startswith("_")
    )


def subject(name: str) -> str:
    """Return the first line of a benchmark's docstring."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def main() -> int:
    wanted = sys.argv[1:] or names()
    unknown = [name for name in wanted if name not in names()]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}. There are:")
        for name in names():
            print(f"  {name:12} {subject(name)}")
        return 2
    failed = []
    for name in wanted:
        print(f"--- {name}: {subject(name)}", flush=True)
        # A process each: a benchmark's threads, memory and allocator are nobody else's.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=HERE.parent, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
