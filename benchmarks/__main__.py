"""`python -m benchmarks` lists the benchmarks; with names, or `all`, it runs them one after another."""

import ast
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Return the first line of each module that is a benchmark: one that can be run by itself."""
    found = {}
    for path in sorted(_HERE.glob("*.py")):
        text = path.read_text()
        if path.stem.startswith("__") or '__name__ == "__main__"' not in text:
            continue
        found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> int:
    known, wanted = benchmarks(), sys.argv[1:]
    if not wanted:
        for name, what in known.items():
            print(f"python -m benchmarks.{name:12}  {what}")
        print("python -m benchmarks all")
        return 0
    names = list(known) if wanted == ["all"] else wanted
    if unknown := [name for name in names if name not in known]:
        print(f"no such benchmark: {', '.join(unknown)}. There are: {', '.join(known)}")
        return 2
    return max(subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
