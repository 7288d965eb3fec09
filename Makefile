# Everything starts here: `make run` for a first result, `make test` for the tests, `make docs` for the site.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-flower test-ci test-slow docs lint format clean

run: $(VENV)/.run
	$(VENV)/bin/fednmap compare --preset digits

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest --numprocesses 2 -m "not slow"

# The tests of Flower with another version of it, in an environment on top of .venv. Where what it requires cannot be had,
# the version itself is installed without it.
FLWR ?= 1.42.0
OTHER := .venv-flwr-$(FLWR)
OTHER_PIP := $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check
test-flower: $(VENV)/.test
	$(VENV)/bin/python -m venv $(OTHER)
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')')" > \
	  $$($(OTHER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth
	$(OTHER_PIP) flwr==$(FLWR) || echo "flwr $(FLWR): a requirement cannot be installed; testing it with those of .venv"
	$(OTHER_PIP) --ignore-installed --no-deps flwr==$(FLWR)
	PYTHONPATH=$(CURDIR) $(OTHER)/bin/python -c "import flwr; assert flwr.__version__ == '$(FLWR)', flwr.__version__"
	PYTHONPATH=$(CURDIR) $(OTHER)/bin/python -m pytest --numprocesses 2 -m "not slow" tests/flower

# A share of the slow tests, a few minutes on two cores. Those between real processes take turns, by the number of commits.
TURN ?= $(shell expr $$(git rev-list --count HEAD 2>/dev/null || echo 0) % 12)
test-ci: $(VENV)/.test
	$(VENV)/bin/python tests/mutations.py fednmap --turn $(TURN)
	$(VENV)/bin/python -m pytest --numprocesses 2 -m "slow and (ci(turn='every') or ci(turn=$(TURN)))"

test-slow: $(VENV)/.test
	$(VENV)/bin/python -m pytest --numprocesses 2 -m slow

docs: $(VENV)/.docs
	$(VENV)/bin/sphinx-build -W --keep-going -b html $(SPHINXOPTS) docs docs/_build/html

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"

# torch goes in first: whatever asks for it later finds the pinned one already there.
$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable ".[all]" --group test --group lint
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) --editable ".[all]" --group docs
	touch $@

clean:
	rm -rf $(VENV) .venv-flwr-*
