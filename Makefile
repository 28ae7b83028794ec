# The same steps on a laptop and in CI. Everything runs in .venv, which `make setup` builds.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
# Tests start hundreds of programs. Without cached bytecode each compiles torch again: 6 s in place of 1.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Where real components for `make test-stack` are kept, outside the checkout.
export OTEL_TRAIN_TEST_BIN ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/otel-train/stack/bin

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup: $(STAMP)  ## build .venv; does nothing when it is up to date

# uv makes the environment in seconds. Without it, pip fetches it into a folder of this checkout.
$(STAMP): pyproject.toml hatch_build.py otel_train/_edges.c otel_train/_device_events.c
	@uv=uv; \
	if ! uv --version >/dev/null 2>&1; then \
	  uv=.uv/bin/uv; \
	  [ -x "$$uv" ] || { echo "fetching uv into .uv"; python3 -m pip install --quiet --target .uv uv; }; \
	fi; \
	echo "building $(VENV) (torch is large: minutes the first time)"; \
	[ -x $(PY) ] || "$$uv" venv --quiet --python '>=3.11,<3.15' $(VENV); \
	"$$uv" pip install --quiet --python $(PY) --editable '.[dev,demo]'
	@touch $@

.PHONY: demo
demo: setup  ## train a small model on real text with instrumentation; about a minute
	@$(VENV)/bin/otel-train demo

# What these targets write lies in .profile, which git does not see; profile-clean removes nothing else.
.PHONY: profile profile-check profile-train profile-dashboard profile-clean
profile: setup .profile/.gitignore  ## capture 50 steps of the demo, and write its artifacts to .profile/artifacts
	$(VENV)/bin/otel-train profile --steps 50 --run-dir .profile/runs --output-dir .profile/artifacts
profile-check: setup  ## validate those artifacts, print the analysis, write the report
	$(VENV)/bin/otel-train validate .profile/artifacts --analysis --report
profile-train: setup .profile/.gitignore  ## train the demo for 3 epochs with the profiler on
	$(VENV)/bin/otel-train demo --profiler on --epochs 3 --steps-per-epoch 100 --run-dir .profile/runs
profile-dashboard: setup  ## show those runs in the browser; Ctrl-C ends it
	@[ -d .profile/runs ] || { echo "no run there yet: make profile, or make profile-train"; exit 1; }
	$(VENV)/bin/otel-train ui .profile/runs
profile-clean:  ## remove what these targets wrote
	rm -rf .profile/runs .profile/artifacts
	rm -f .profile/.gitignore
	rmdir .profile 2>/dev/null || true
.profile/.gitignore:
	@mkdir -p .profile && echo '*' > $@

.PHONY: summary-svg
summary-svg: setup  ## run the demo and draw its run summary for the README
	$(VENV)/bin/otel-train demo
	$(PY) tools/summary_svg.py

# Three at a time also on two cores: half of the time a test waits for the processes that it started.
# Tests that fail while others run beside them run once more, one at a time: several wait for processes, alerts or ranks, which
# are late on a busy machine. What fails again fails the target, as does a coverage that is too low (no test is left to run).
QUICK := not stack and not gpu and not slow and not matrix
WHOLE := (stack or slow) and not gpu and not matrix and not alone
ONCE_MORE := $(PY) -m pytest -q --last-failed --last-failed-no-failures none

.PHONY: test
test: setup  ## all tests that need only this repository; about ten minutes
	$(PY) -m pytest -q -n 3 --dist loadfile -m "$(QUICK)" $(if $(COVERAGE),--cov --cov-report=term) || $(ONCE_MORE) -m "$(QUICK)"

.PHONY: unit
unit: setup  ## the quick tests only
	$(PY) -m pytest -q -m "$(QUICK)" tests/unit tests/contract/test_house.py tests/contract/test_opening_files.py \
	  || $(ONCE_MORE) -m "$(QUICK)"

.PHONY: check
check: static unit  ## style, types, import order, generated files, quick tests

.PHONY: static lint types layers
static: setup lint types layers docs-check rules-check dashboards-check  ## the same without the tests
lint: setup  ## ruff, formatting included
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
types: setup  ## mypy, strict
	$(VENV)/bin/mypy
layers: setup  ## check the import order of packages
	$(VENV)/bin/lint-imports

.PHONY: docs docs-check
docs: setup  ## write the generated reference pages
	$(PY) tools/catalog_pages.py --write
	$(PY) tools/settings_page.py --write
	$(PY) tools/cli_page.py --write
	$(PY) tools/findings_page.py --write
	$(PY) tools/loops_page.py --write
docs-check: setup  ## check that the generated reference pages are up to date
	$(PY) tools/catalog_pages.py --check
	$(PY) tools/settings_page.py --check
	$(PY) tools/cli_page.py --check
	$(PY) tools/findings_page.py --check
	$(PY) tools/loops_page.py --check

.PHONY: loops
loops: frameworks  ## count every loop again, and write docs/reference/loops.md
	GOLDEN=write $(PY) -m pytest -q tests/integration -k "counted and (loops or frameworks)"
	$(PY) tools/loops_page.py --write

.PHONY: rules rules-check
rules: setup  ## test the Prometheus rules with promtool; write their Kubernetes copy and reference pages
	$(PY) tools/alerts_pages.py --write
	$(PY) deploy/kubernetes/build.py --write
	tools/get_components.sh prometheus
	"$(OTEL_TRAIN_TEST_BIN)/promtool" check rules deploy/prometheus/rules/*.yml
	$(PY) -m pytest -q tests/rules tests/contract/test_rules.py
rules-check: setup  ## check that the files made from the rules are up to date
	$(PY) tools/alerts_pages.py --check
	$(PY) deploy/kubernetes/build.py --check

.PHONY: dashboards dashboards-check
dashboards: setup  ## write Grafana's dashboards and their reference page
	$(PY) -m grafana.build --write
	$(PY) deploy/kubernetes/build.py --write
dashboards-check: setup  ## check that the dashboards are up to date
	$(PY) -m grafana.build --check

.PHONY: screenshots
screenshots: setup  ## photograph each dashboard in a real Grafana; needs Docker and Chromium; 10 minutes
	$(PY) tools/screenshots.py

.PHONY: fix
fix: setup  ## format, and apply automatic fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: bench
bench: setup  ## measure the overhead; writes benchmarks/results and docs/reference/overhead.md
	$(PY) -m benchmarks

.PHONY: bench-scale
bench-scale: setup  ## measure the load of simulated ranks on Collector and Prometheus; writes docs/explanation/scale.md; 7 minutes
	tools/get_components.sh collector prometheus jaeger
	$(PY) -m benchmarks.scale.sweep

# HolisticTraceAnalysis brings a hundred packages: it gets an environment of its own, and only this target needs it.
.hta/bin/python:
	@uv=uv; uv --version >/dev/null 2>&1 || uv=.uv/bin/uv; \
	"$$uv" venv --quiet .hta && "$$uv" pip install --quiet --python .hta/bin/python 'HolisticTraceAnalysis==0.5.0' 'pandas<3'

.PHONY: bench-analyze
bench-analyze: setup .hta/bin/python  ## measure the trace analysis; compare it with HolisticTraceAnalysis
	$(PY) -m benchmarks.traces --hta .hta/bin/python

.PHONY: coverage
coverage: setup  ## the same tests with line and branch coverage; fails below fail_under of pyproject.toml
	$(MAKE) test COVERAGE=1

.PHONY: components
components:  ## Collector, Prometheus, Alertmanager, Jaeger: built once into a cache folder, about 25 minutes
	tools/get_components.sh

.PHONY: test-stack
test-stack: setup components frameworks browser  ## test a real stack, and long runs
	$(PY) -m pytest -q -n 3 --dist loadfile -m "$(WHOLE)" || $(ONCE_MORE) -m "$(WHOLE)"
	$(PY) -m pytest -q -m alone || $(ONCE_MORE) -m alone

.PHONY: test-matrix
test-matrix: setup  ## test one loop on four versions of torch and of Python; downloads torch
	$(PY) -m pytest -q -n 2 -m matrix tests/integration/test_torch_matrix.py

.PHONY: stack-up stack-down
stack-up: setup  ## start the stack in containers; without Docker: otel-train stack up --local
	$(VENV)/bin/otel-train stack up
stack-down: setup  ## stop the stack; keep its data
	$(VENV)/bin/otel-train stack down

.PHONY: frameworks
frameworks: setup $(VENV)/.frameworks  ## install the frameworks and trackers that tests and examples use
$(VENV)/.frameworks: $(STAMP)
	@uv=uv; "$$uv" --version >/dev/null 2>&1 || uv=.uv/bin/uv; \
	"$$uv" pip install --quiet --python $(PY) --editable '.[dev,demo,frameworks]'
	@touch $@

# Others than root install it themselves: the tests that are skipped say so.
.PHONY: browser
browser:  ## Chromium, for the tests of the local page and of the report
	@if ! command -v chromium chromium-browser google-chrome >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
	    || echo "apt-get could not install chromium: the tests in a browser are skipped"; \
	fi

.PHONY: test-gpu bench-gpu
test-gpu: setup  ## tests that need a CUDA device
	$(PY) -m pytest -q -m gpu
bench-gpu: setup  ## measure the overhead on a CUDA device
	$(PY) -m benchmarks --device cuda
	$(PY) -m benchmarks.device_time
	$(PY) -m benchmarks.transfers

.PHONY: clean
clean:  ## remove what these targets have built
	rm -rf $(VENV) .uv .hta .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* dist
	find otel_train tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
