# One line a target; the logic is in tools/. Every target first installs what is missing.
PYTHON ?= python3
SEEDS ?= 20000
KILLS ?= 50
RUN = @$(PYTHON) tools/run.py

.DEFAULT_GOAL = help
.PHONY: help setup check format test proof demo example bench docs release lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything into .venv (and a Java, if the machine has none)
	@$(PYTHON) tools/setup.py

check: ## lint, format, types (of the docs too), layers
	$(RUN) python tools/check.py

format: ## put the code into its format, and fix what ruff can
	$(RUN) python tools/check.py --fix

test: ## run the tests (ARGS="-k name")
	$(RUN) pytest tests -m "not proof" --numprocesses 5 --dist loadfile --no-loadscope-reorder $(ARGS)

demo: ## see exactly-once hold while the pipeline is killed (ARGS="--rows 1000")
	$(RUN) epochal demo $(ARGS)

example: ## run a program of examples/ with its servers (NAME=orders, FOLDER=… to keep what it made)
	$(RUN) python tools/example.py $(NAME) $(FOLDER)

bench: ## measure (ONLY=name)
	$(RUN) python -m bench $(ONLY)

docs: ## generate the reference pages, check the links, build the site into build/site
	$(RUN) python tools/docs.py $(ARGS)

proof: ## prove by brute force (ONLY="model simulation shared-journal mutants clients kills storms servers compat connect hudi", SEEDS=100000, KILLS=200)
	$(RUN) python tools/prove.py --seeds $(SEEDS) --kills $(KILLS) $(ONLY)

release: ## build wheel and sdist into dist/, and try each extra alone (URL=https://… of the repository)
	@URL="$(URL)" $(PYTHON) tools/run.py python tools/release.py

lock: ## resolve the dependencies anew
	@$(PYTHON) tools/lock.py

clean: ## remove all that the targets made
	@$(PYTHON) tools/clean.py
