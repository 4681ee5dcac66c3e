# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A file's tests share clusters, so they stay together. The order is kept: the small files come last and fill the gaps.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-fast lint types bench bench-serve bench-recovery soak faults venv format check clean

demo: venv  ## a coordinator, two workers, two instances at once, an answer, a trace, nothing left
	$(BIN)/muster demo

test: venv  ## every test that this machine can run: files side by side, then by itself what is promised in seconds
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --ignore=tests/faults
	$(BIN)/python -m pytest tests/faults

test-fast: venv  ## the pure tests only, half a minute
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not process and not mlx and not netns"

lint: venv  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv  ## basedpyright, strict; tests beside it keep their time
	nice -n 10 $(BIN)/basedpyright

bench: venv  ## how fast groups form, beside mlx.launch
	$(BIN)/muster bench formation

bench-serve: venv  ## how fast models answer over HTTP, beside mlx_lm.server; a quarter of an hour
	$(BIN)/muster bench serve --output bench-serve.json

bench-recovery: venv  ## how fast muster notices what dies and is whole again; half an hour
	$(BIN)/muster bench recovery --output bench-recovery.json

soak: venv  ## create, use, kill and delete for a quarter of an hour: nothing lost, nothing grows, nothing left
	$(BIN)/muster bench soak --minutes 15 --output bench-soak.json

faults: venv  ## every fault in every phase on every target, as a table; FAULTS="--help" for less; ten minutes
	PYTHONPATH=tests/faults:tests/netns:tests/process $(BIN)/python tests/faults/matrix.py $(FAULTS)

check: lint types test  ## what CI runs

format: venv  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(READY)  ## .venv with muster and everything that its tests need

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "muster needs Python 3.11 or newer; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

clean:  ## remove what make made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist build
