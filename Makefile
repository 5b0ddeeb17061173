# Everything on a fresh machine: `make demo` shows it, `make test` proves it, `make bench` measures
# it against llama.cpp.
# Needs Python 3.11 with venv, make and a C compiler.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8080
EXTRAS ?= compile,test
comma := ,
BIN := $(VENV)/bin
TYPING := build/typing/emberd

.PHONY: demo test check bench bench-residency clean

# One stamp for each choice of extras: asking for more of them installs more.
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

$(INSTALLED): pyproject.toml setup.py $(wildcard daemon/native/*.c daemon/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[$(EXTRAS)]'
	touch $@

build/demo/manifest.json: $(INSTALLED) $(wildcard firmware_assets/demo/model/*) \
		firmware_assets/demo/expert_activation_map.bin \
		$(wildcard compile/*.py compile/*/*.py)
	$(BIN)/emberc build firmware_assets/demo/model -o build/demo --name demo --target host --recipe q4 \
		--map firmware_assets/demo/expert_activation_map.bin

demo: build/demo/manifest.json
	exec $(BIN)/python firmware_assets/demo/show.py build/demo --port $(PORT)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPING)
	ln -sfn $(CURDIR)/compile $(CURDIR)/daemon $(CURDIR)/targets $(TYPING)/
	cd build/typing && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		-p emberd.compile -p emberd.daemon -p emberd.targets

test: check
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# The peer is compiled for this machine (about 10 minutes, once). BENCH=--quick: the main figures.
$(VENV)/.bench: $(INSTALLED)
	CMAKE_ARGS=-DGGML_NATIVE=ON $(BIN)/pip install --quiet -e '.[bench]'
	touch $@

bench: $(VENV)/.bench
	PYTHONPATH=tests $(BIN)/python -m bench $(BENCH)

# With less memory than the experts take; limiting it needs root.
bench-residency: $(VENV)/.bench
	PYTHONPATH=tests $(BIN)/python -m bench.residency $(BENCH)

clean:
	rm -rf build dist $(VENV)
