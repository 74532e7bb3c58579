"30f_own_texts: conversations as marked tokens, states on demand, and steps of several batches and processes"
import json, os, subprocess, sys
from threading import Barrier, Thread

import numpy as np, pytest, torch

from helpers import LONG, proves, refuses, tiny
from house import ROOT
from specref import tokenizer
from specref.models.recipe import llama
from specref.train import texts
from specref.train.harness import TargetModel, state_dataset
from specref.train.medusa import Medusa
from specref.train.texts import (Devices, OnlineStates, answer_spans, encode_conversation, encode_texts,
                                 find_devices, read_texts)

CHATML = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")

def tok(template=CHATML):
    "The embedded tokenizer with a chat template"
    own = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    own.chat_template = template
    return own

def turns(*contents):
    "A conversation in which user and assistant take turns"
    return [dict(role=("user", "assistant")[i % 2], content=x) for i, x in enumerate(contents)]

# A file

LINES = [dict(text="Plain."), dict(messages=turns("Why?", "Because.")),
         dict(conversations=[{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}])]

def written(path, *rows):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows))
    return path

def test_the_three_kinds_of_lines(tmp_path):
    "Two forms of one conversation are the same turns; empty lines do not count"
    text, one, two = read_texts(written(tmp_path/"t.jsonl", LINES[0], "", *LINES[1:]))
    assert text == "Plain." and one == two == turns("Why?", "Because.")

@pytest.mark.parametrize("row, words", [
    ("{", "line 2 that is no JSON"), (dict(text=""), "line 2 with neither"), ([1], "line 2 with neither"),
    (dict(messages=turns("Why?")), "line 2, a conversation without an answer"),
    (dict(messages=[dict(role="assistant")]), "line 2 with a turn without")])
def test_a_wrong_line_is_named(tmp_path, row, words):
    with pytest.raises(ValueError, match=f"^data: got {words}"):
        read_texts(written(tmp_path/"t.jsonl", LINES[0], row))

def test_no_file_and_no_text(tmp_path):
    refuses("data", read_texts, tmp_path/"none.jsonl")
    refuses("data", read_texts, written(tmp_path/"empty.jsonl", ""))

# Answers

@proves("prop-spans")
def test_the_answers_of_a_conversation():
    "Of two answers everything that the model writes: their words and the end of the turn"
    chat = turns("Why?", "Because.", "Really?", "Yes.")
    text, spans = answer_spans(tok(), chat)
    assert [text[a:b] for a, b in spans] == ["Because.<|end|>\n", "Yes.<|end|>\n"]
    ids, marks = encode_conversation(tok(), chat)
    assert tok().decode([x for x, m in zip(ids, marks) if m]) == "Because.<|end|>\nYes.<|end|>\n"
    assert tok().decode(ids) == text

def test_the_answer_is_encoded_as_it_is_written():
    "Behind the template's space, which a tokenizer would join with the first word of the answer"
    own = tok(CHATML.replace("<|assistant|>", "<|assistant|> ").replace("|>{{", "|> {{"))
    ids, marks = encode_conversation(own, turns("Why?", "It is."))
    assert [x for x, m in zip(ids, marks) if m] == own.encode("It is.<|end|>\n", add_special_tokens=False)
    assert own.encode(own.decode(ids), add_special_tokens=False) != ids

def test_templates_that_cannot_be_used():
    "One that rewrites earlier turns, one that raises, none"
    last_only = "{{ messages[-1].content }}{% if add_generation_prompt %}:{% endif %}"
    chat = turns("Why?", "Because.", "Really?", "Yes.")
    refuses("data", answer_spans, tok(last_only), chat)
    refuses("data", answer_spans, tok("{{ raise_exception('no') }}"), chat)
    refuses("target", encode_conversation, tok(None), chat)

def test_rows_of_one_length():
    "Conversations are cut or padded, texts joined and cut; a row without an answer in it is left out"
    chats = [turns("Why?", "Because."), turns("Why?" * 40, "No."), turns("Why?", "Because " * 60)]
    items = [*chats, "One. " * 60]
    found = encode_texts(tok(), items, 48, 512)
    x, counts = found.x, found.counts
    assert x.shape == counts.shape and x.shape[1] == 48 and found.cut == 2 and found.held == 1
    assert sorted(counts.sum(1).tolist())[0] < 10 and (counts.sum(1) == 48).sum() == len(x) - 2
    padded = counts.sum(1).argmin()
    assert (x[padded, 30:] == tokenizer().eos_token_id).all() and not counts[padded, 30:].any()
    parts = [found.part(held) for held in (False, True)]   # the last row is held out, with its marks
    assert all(np.array_equal(np.concatenate(both), rows) for both, rows in zip(zip(*parts), (x, counts)))
    assert len(parts[1][0]) == 1
    assert encode_texts(tok(), ["One. " * 200], 48, 512).counts is None
    refuses("data", encode_texts, tok(), [turns("Why?", "Because.")], 48, 512)

# States and steps

def test_online_states_are_those_on_disk(tmp_path):
    "But for the half precision of the file; the marks are kept"
    base, x = TargetModel(llama(2, 32, 64)), np.random.default_rng(0).integers(512, size=(6, 10))
    counts = np.arange(10) > np.arange(6)[:, None]
    online = OnlineStates(base, x, (1, 2), counts)[np.array([1, 4])]
    stored = state_dataset(base, x, (1, 2), tmp_path, counts=counts)[np.array([1, 4])]
    assert torch.equal(online.x, stored.x) and torch.equal(online.counts, stored.counts)
    assert all((online.states[k] - s).abs().max() < 1e-3 * s.abs().max() for k, s in stored.states.items())

class Together:
    "The mean over threads instead of processes"
    def __init__(self, n): self.n, self.seen, self.barrier = n, {}, Barrier(n)
    def mean(self, rank):
        def mean(gradient):
            self.seen[rank] = gradient
            self.barrier.wait()
            out = sum(self.seen.values()) / self.n
            self.barrier.wait()
            return out
        return mean

def heads():
    torch.manual_seed(0)
    return Medusa(TargetModel(tiny(7, layers=2).float()), 2)

def stepped(devices, rows, steps=2, net=None):
    "The weights after some steps on batches of `rows` texts; the loss is so small that nothing is clipped"
    net, g = net or heads(), np.random.default_rng(0)
    data = OnlineStates(net.base[0], g.integers(7, size=(16, 12)), (2,))
    loss_of = lambda net, number: .01 * net.loss(data[np.arange(rows*number, rows*(number + 1))], 0)
    opt = torch.optim.SGD(net.parameters())
    for step in range(steps): devices.update(net, opt, loss_of, step, 50.)
    return torch.cat([w.detach().flatten() for w in net.parameters()])

def off(a, b): return (a - b).abs().max() / (stepped(Devices(torch.device("cpu")), 8, 0) - b).abs().max()

@proves("prop-accumulated")
def test_batches_and_processes_make_one_step():
    "Eight texts a step: one batch, four of two, or two processes of two batches of two; other texts do not"
    cpu, found, together = torch.device("cpu"), {}, Together(2)
    whole = stepped(Devices(cpu), 8)
    assert off(stepped(Devices(cpu, 4), 2), whole) < .02 < .1 < off(stepped(Devices(cpu, 2), 2), whole)
    nets = heads(), heads()   # a seed is not of a thread
    def process(rank): found[rank] = stepped(Devices(cpu, 2, 2, rank, together.mean(rank)), 2, 2, nets[rank])
    threads = [Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    assert torch.equal(found[0], found[1]) and off(found[0], whole) < .02

def test_the_loss_of_a_step_is_the_mean():
    "The number that the bar shows, of the batches 3, 4 and 5"
    net, loss_of = heads(), lambda net, number: number + 0 * sum(w.sum() for w in net.parameters())
    step = Devices(torch.device("cpu"), 3).update
    assert step(net, torch.optim.SGD(net.parameters()), loss_of, 1, .1) == 4

def test_other_processes_write_beside_the_first(tmp_path):
    "They begin with what the first has stored, and never write there"
    (tmp_path/"run").mkdir()
    (tmp_path/"run"/"last.pt").write_text("stored")
    first, second = (Devices(torch.device("cpu"), rank=rank).folder(tmp_path/"run") for rank in (0, 1))
    assert first == tmp_path/"run" != second and (second/"last.pt").read_text() == "stored"

def test_devices_that_are_not_there():
    refuses("device", find_devices, "nowhere")
    refuses("parts", find_devices, None, 0)

@pytest.mark.skipif(not LONG, reason="starts two processes; make test-long runs it")
def test_two_processes_of_a_launcher(tmp_path):
    "Started by `torchrun`, joined by accelerate: the weights are those of one process with two batches"
    (tmp_path/"job.py").write_text(
        "import torch, sys\nsys.path.insert(0, 'tests')\nfrom test_texts import stepped\n"
        "from specref.train.texts import find_devices\nd = find_devices('cpu', 1)\n"
        "assert d.processes == 2\ntorch.save(stepped(d, 4), f'{sys.argv[1]}/{d.rank}.pt')\n")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", tmp_path/"job.py", tmp_path]
    subprocess.run(run, cwd=ROOT, check=True, env=os.environ | dict(OMP_NUM_THREADS="1"), timeout=300)
    a, b = (torch.load(tmp_path/f"{rank}.pt") for rank in range(2))
    assert torch.equal(a, b) and off(a, stepped(Devices(torch.device("cpu"), 2), 4)) < .02

def test_several_processes_need_accelerate(monkeypatch):
    "Without it the error says what to install"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"specref\[train\]"): texts.find_devices()
