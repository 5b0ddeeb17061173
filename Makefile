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

.PHONY: demo test check bench bench-residency bench-starts clean

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

# llama-server, of the sources that the peer was made of.
build/llama-server: $(VENV)/.bench
	rm -rf build/llama.cpp && mkdir -p build/llama.cpp
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python -d build/llama.cpp \
		llama-cpp-python==$$($(BIN)/python -c 'import llama_cpp; print(llama_cpp.__version__)')
	tar -xzf build/llama.cpp/*.tar.gz -C build/llama.cpp --strip-components 1
	$(BIN)/cmake -S build/llama.cpp/vendor/llama.cpp -B build/llama.cpp/build \
		-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
		-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF
	$(BIN)/cmake --build build/llama.cpp/build --target llama-server --parallel $$(nproc)
	cp build/llama.cpp/build/bin/llama-server $@

# Start to first token, over HTTP; after `make bench`, which makes the files of both sides.
bench-starts: build/llama-server
	PYTHONPATH=tests $(BIN)/python -m bench.starts build/bench/artifact \
		--peer build/llama-server build/bench/peer.gguf $(BENCH)

clean:
	rm -rf build dist $(VENV)
