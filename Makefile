# The venv is made once; delete .venv to make it anew.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test full slow check format bench gpu table clean

# The command weft, in .venv/bin.
install: .venv/user
	@echo "weft is in $(BIN): type \`source $(BIN)/activate\`, then \`weft doctor\`, which says what this machine has; then \`weft train FILE\` with a text of yours, or \`weft demo\`"

demo: .venv/user
	$(BIN)/weft demo

# Compiled modules are kept, whatever the environment says: else every process of a test compiles all of weft anew.
export PYTHONDONTWRITEBYTECODE :=

# Two processes: the suite is mostly computing, and holds itself to two cores. A test that hangs fails, and says where.
DEADLINE = --override-ini faulthandler_timeout=300 --override-ini faulthandler_exit_on_timeout=true
TESTS = $(BIN)/pytest --numprocesses 2 --dist worksteal $(DEADLINE)
test: .venv/dev
	$(TESTS) --budget

full: .venv/dev
	$(TESTS) -m "not slow"

slow: .venv/dev
	$(BIN)/pytest -m slow -rs

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/invariants --deselect tests/invariants/test_exact.py

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/bench
	$(BIN)/python -m benchmarks

# What only a GPU can tell, in nine minutes on one card; without one it says so and runs small. TORCH: what pip installs in
# place of the torch that is here, such as TORCH=torch, or TORCH="torch --index-url ..." for another CUDA. PARTS: these alone.
gpu: .venv/user
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check --force-reinstall $(TORCH))
	$(BIN)/python -m benchmarks.gpu $(PARTS)

# Loss against bytes of every method (docs/measured.md): a day of one core. What reports hold already is not played again.
# TEXT: tinyshakespeare, input.txt of karpathy/char-rnn.
COMPARE = $(BIN)/weft bench methods --jobs 2
SHAKESPEARE = --set 'data.source.paths=["$(abspath $(TEXT))"]'
table: .venv/bench
	@test -f "$(TEXT)" || { echo "say where tinyshakespeare is: make table TEXT=input.txt"; exit 2; }
	$(COMPARE) recipes/bench/methods.toml $(SHAKESPEARE) --out benchmarks/reports/methods
	$(COMPARE) recipes/bench/alone.toml $(SHAKESPEARE) --out benchmarks/reports/methods_alone
	$(COMPARE) recipes/bench/library.toml --out benchmarks/reports/library
	$(COMPARE) recipes/bench/long.toml --out benchmarks/reports/long
	$(COMPARE) recipes/bench/eight.toml --out benchmarks/reports/eight

# torch first and pinned: its CPU build is much smaller than what a loose requirement brings.
.venv/base: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	touch $@

.venv/user: .venv/base pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/dev: .venv/base pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ .venv/user

.venv/bench: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,plot]'
	touch $@

clean:
	rm -rf .venv build dist
