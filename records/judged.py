"""`specref judge-engine` on servers of engines: what was typed, and what was printed (`make judged`)

judged.py VLLM LLAMA [NAME ...]: the Pythons of two environments, one with vLLM for CPUs, the other with
xllamacpp; each server is started and judged, or those of the names.
judged.py serve TARGET [DRAFT]: llama.cpp's server, in the second."""
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
DRAFTED, FEWER = ["--draft", "small", "--concurrency", "4"], ["--tokens", "4000"]
SERVERS = {   # name: the engine, its package, which Python, how it is started, and how it is judged
    "vllm": ("vLLM (CPU)", "vllm-cpu", 0, VLLM, [*DRAFTED, *FEWER]),
    "vllm-draft": ("vLLM (CPU)", "vllm-cpu", 0, [*VLLM, "--speculative-config", json.dumps(DRAFT)], DRAFTED),
    "llama-draft": ("llama.cpp", "xllamacpp", 1, [*LLAMA, "small"], DRAFTED)}

def serve(target, draft=""):
    "llama.cpp's server on files of `specref convert`, until it is stopped"
    from specref.certify.black_boxes import llama_server
    drafted = dict(drafter=draft, kind="DRAFT_SIMPLE", draft=dict(probabilistic=True)) if draft else {}
    server = llama_server(FOLDER/"gguf", target, slots=4, **drafted)
    print(server.listening_address, flush=True)
    while True: time.sleep(60)

def write_models():
    "The shipped models as checkpoints with a tokenizer, and as files for llama.cpp"
    from specref.models.embedded import DATA, raw_model
    from specref.train.checkpoints import convert
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in ("large", "small"):
        raw_model(name).save_pretrained(FOLDER/name)
        shutil.copytree(DATA/"tokenizer", FOLDER/name, dirs_exist_ok=True)
        convert(name, "gguf", FOLDER/"gguf"/name)

@contextmanager
def started(python, argv):  # -> url
    "A server in a process of its own, once it lists its model"
    own = [Path(__file__).resolve() if word == LLAMA[0] else word for word in argv]
    with open(FOLDER/"server.log", "w") as log:
        more = dict(cwd=FOLDER, env=os.environ | CPU, stdout=log, stderr=log)
        run = subprocess.Popen([python, "-W", "ignore", *own], **more)
    try: yield first_answer(run, FOLDER/"server.log")
    finally:
        run.terminate()
        run.wait()

def first_answer(run, log):  # -> url
    "Wait until a server answers: at the address that it prints, or at the usual one"
    from specref.app.served import exchange
    while run.poll() is None:
        time.sleep(1)
        url = next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")), URL)
        try: exchange(f"{url}/v1/models")
        except ValueError: continue
        return url
    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")

def judged(name, pythons):  # -> dict
    engine, package, which, argv, more = SERVERS[name]
    find = f"from importlib.metadata import version; print(version({package!r}))"
    read = dict(check=True, capture_output=True, text=True)
    version = subprocess.run([pythons[which], "-c", find], **read).stdout.strip()
    with started(pythons[which], argv) as url:
        ask = ["judge-engine", "--url", url, "--target", "large", *more]
        whole = [sys.executable, "-W", "ignore", "-m", "specref", *ask]
        run = subprocess.run(whole, capture_output=True, text=True, cwd=FOLDER)
    typed, printed = shlex.join(["specref", *ask]), run.stdout or run.stderr
    return dict(name=name, engine=engine, version=f"{package} {version}", status=run.returncode,
                server=shlex.join(["python", *argv]), typed=typed.replace(url, URL),
                printed=printed.replace(url, URL).replace(f"{FOLDER}/", ""))

def main(vllm, llama, *names):
    "Judge the servers, or those of the names, and write the record"
    from specref.core.check import write_record
    write_models()
    pythons = [Path(python).absolute() for python in (vllm, llama)]   # a server has a folder of its own
    for name in names or SERVERS:
        found = judged(name, pythons)
        print(found["server"], found["printed"], sep="\n", flush=True)
        runs = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
        runs = {run["name"]: run for run in runs} | {name: found}
        write_record(RECORD, "make judged", dict(runs=[runs[name] for name in SERVERS if name in runs]))

if __name__ == "__main__": serve(*sys.argv[2:]) if sys.argv[1] == "serve" else main(*sys.argv[1:])
