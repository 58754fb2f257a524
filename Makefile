# make demo, make test and make check each do all the set-up; they need Python 3.11 or later and make, nothing else.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# -qq: pip still prints errors, without a warning per package for each configured location that lacks it.
PIP := $(PY) -m pip --disable-pip-version-check install -qq -c constraints.txt
ARGS ?=

# One thread per process: pipeline ranks are threads or processes of their own and would fight over the cores.
export OMP_NUM_THREADS := 1

.PHONY: setup demo test check format-check lint types layers lines clean

setup: $(READY)

# The stamp is written last, so a set-up that was interrupted is taken up again. torch comes first and pinned: the project's
# own looser request could fetch another, much larger build. setuptools is pinned too, hence no build isolation.
$(READY): pyproject.toml constraints.txt
	@for p in $(or $(PYTHON),python3.11 python3 python); do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$p; break; fi; done; \
	if [ -z "$$found" ]; then echo "zbfx needs Python 3.11 or later; name it with: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	if [ ! -x $(PY) ]; then echo "creating $(VENV) with $$($$found --version)"; $$found -m venv $(VENV); fi
	@echo "installing (once; torch is large) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(READY)
	HF_HUB_OFFLINE=1 $(PY) -m zbfx.demo $(ARGS)

# make test ARGS="-k schedule" runs some; ARGS=--update-golden rewrites the golden texts.
test: $(READY)
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

check: format-check lint types layers lines

format-check: $(READY)
	$(PY) -m ruff format --check .

lint: $(READY)
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m mypy

layers: $(READY)
	$(VENV)/bin/lint-imports

lines: $(READY)
	@find zbfx -name '*.py' | xargs wc -l | sort -n

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
