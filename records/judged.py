"""The command `specref judge-engine` on servers of engines: what was typed, and what was printed

judged.py VLLM LLAMA [NAME ...]: the Pythons of two environments, one with vLLM for CPUs, the other with xllamacpp;
each server is started and judged, or those of the names. judged.py serve FOLDER ...: llama.cpp's server, in the second."""
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

RECORD, FOLDER = Path(__file__).with_suffix(".json"), Path(gettempdir())/"specref-judged"
URL = "http://127.0.0.1:8000"
CPU = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
           HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
VLLM = ["-m", "vllm.entrypoints.openai.api_server", "--model", "large", "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
LLAMA = [Path(__file__).name, "serve", "large"]
DRAFT = dict(method="draft_model", model="small", num_speculative_tokens=4)
DRAFTED, FOUR = ["--draft", "small"], ["--concurrency", "4"]
SERVERS = {   # name: the engine, its package, which Python, how it is started, and how it is judged
    "vllm": ("vLLM (CPU)", "vllm-cpu", 0, VLLM, DRAFTED),
    "vllm-draft": ("vLLM (CPU)", "vllm-cpu", 0, [*VLLM, "--speculative-config", json.dumps(DRAFT)], DRAFTED),
    "llama-draft": ("llama.cpp", "xllamacpp", 1, [*LLAMA, "small"], [*DRAFTED, *FOUR])}

def serve(target, draft=""):
    "llama.cpp's server on files of `specref convert`, until it is stopped"
    from specref.certify.black_boxes import llama_server
    drafted = dict(drafter=draft, kind="DRAFT_SIMPLE", draft=dict(probabilistic=True)) if draft else {}
    server = llama_server(FOLDER/"gguf", target, slots=4, **drafted)
    print(server.listening_address, flush=True)
    time.sleep(3600)

def write_models():
    "The shipped models as checkpoints with a tokenizer, and as files for llama.cpp"
    from specref.models.embedded import DATA, raw_model
    from specref.train.checkpoints import convert
    for name in ("large", "small"):
        raw_model(name).save_pretrained(FOLDER/name)
        shutil.copytree(DATA/"tokenizer", FOLDER/name, dirs_exist_ok=True)
        if not (FOLDER/"gguf"/name).exists(): convert(name, "gguf", FOLDER/"gguf"/name)

@contextmanager
def started(python, argv, patience=300):  # -> url
    "A server in a process of its own, once it lists its model"
    from specref.app.served import exchange
    whole = [Path(__file__).resolve() if word == Path(__file__).name else word for word in argv]
    with open(FOLDER/"server.log", "w") as log:
        run = subprocess.Popen([python, "-W", "ignore", *whole], cwd=FOLDER, env=os.environ | CPU, stdout=log, stderr=log)
    try:
        for _ in range(patience):
            found = [line for line in (FOLDER/"server.log").read_text().split() if line.startswith("http://")]
            url = found[0] if found and "serve" in argv else URL
            try: exchange(f"{url}/v1/models")
            except ValueError: time.sleep(1)
            else: break
        yield url
    finally:
        run.terminate()
        run.wait()

def judged(name, pythons):  # -> dict
    engine, package, which, argv, more = SERVERS[name]
    find = f"from importlib.metadata import version; print(version({package!r}))"
    version = subprocess.run([pythons[which], "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    with started(pythons[which], argv) as url:
        ask = ["judge-engine", "--url", url, "--target", "large", *more]
        run = subprocess.run([sys.executable, "-W", "ignore", "-m", "specref", *ask], capture_output=True, text=True,
                             cwd=FOLDER)
    typed = shlex.join(["specref", *ask]).replace(url, URL)
    return dict(name=name, engine=engine, version=f"{package} {version}", server=shlex.join(["python", *argv]),
                typed=typed, status=run.returncode, printed=(run.stdout or run.stderr).replace(url, URL))

def main(vllm, llama, *names):
    from specref.core.check import write_record
    FOLDER.mkdir(exist_ok=True)
    write_models()
    for name in names or SERVERS:
        found = judged(name, (vllm, llama))
        print(found["server"], found["printed"], sep="\n", flush=True)
        runs = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
        runs = {run["name"]: run for run in runs} | {name: found}
        write_record(RECORD, "records/judged.py VLLM LLAMA",
                     dict(runs=[runs[name] for name in SERVERS if name in runs]))

if __name__ == "__main__": serve(*sys.argv[2:]) if sys.argv[1] == "serve" else main(*sys.argv[1:])
