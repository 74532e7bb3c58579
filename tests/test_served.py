"Chapter 65a: a server is asked for ids, and each thing that can be wrong with it has an error of its own"
import json, threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest, torch

from specref import tokenizer
from specref.app.commands import main
from specref.app.served import shared_vocabulary
from specref.certify import black_boxes as bb
from specref.models.embedded import raw_model
from networks import small_llama
from test_commands import fails

@contextmanager
def serving(reply):
    "A server whose answer to (path, what was posted or None) is an object, or a status and a text"
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *given): pass
        def answer(self, body=None):
            found = reply(self.path, body)
            status, text = found if isinstance(found, tuple) else (200, json.dumps(found))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())
        do_GET = answer
        def do_POST(self): self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(.01,)).start()
        try: yield f"http://127.0.0.1:{server.server_port}"
        finally: server.shutdown()

def completions(ids, text=lambda ids: tokenizer().decode(ids)):
    "A server of `/v1/completions` that lists one model; `ids`: of what was posted"
    def reply(path, body):
        if body is None: return dict(data=[dict(id="mine")])
        found = ids(body)
        return found if isinstance(found, tuple) else dict(choices=[dict(token_ids=found, text=text(found))])
    return reply

def judge(url, *more): return ["judge-engine", "--url", url, "--target", "small", *more]

@torch.inference_mode()
def decode(name, prompt, n, temperature, seed=0):
    "A text of an embedded model"
    draw, text = torch.Generator().manual_seed(seed), [*prompt]
    for _ in range(n):
        z = raw_model(name)(input_ids=torch.tensor([text])).logits[0, -1]
        row = (z/temperature).softmax(-1) if temperature else (z == z.max()).float()
        text.append(int(torch.multinomial(row, 1, generator=draw)))
    return text[len(prompt):]

def llama(asked, sampled):
    "A server like llama.cpp's with two names; at temperature 0 it decodes `small`, otherwise `sampled`"
    def reply(path, body):
        if body is None: return dict(data=[dict(id="a"), dict(id="b")])
        if path != "/completion": return 404, "no such path"
        asked.append(body)
        name, heat = sampled if body["temperature"] else "small", body["temperature"]
        new = decode(name, body["prompt"], body["n_predict"], heat, len(asked))
        return dict(tokens=new, content=tokenizer().decode(new))
    return reply

@pytest.mark.parametrize("sampled", ["small", "large"])
def test_texts_of_the_target_pass_and_those_of_its_draft_do_not(capsys, tmp_path, sampled):
    "Two at a time; requests state the sampler, and with --no-seed they have no seed"
    (tmp_path/"prompts.txt").write_text("def f(\n\nThe value of\n")
    given = "--model", "b", "--tokens", "256", "--n", "32", "--concurrency", "2", "--temperature", ".9"
    more = "--draft", "large", "--no-seed", "--prompts", str(tmp_path/"prompts.txt"), "--json"
    asked, starts = [], {tuple(tokenizer()(x)["input_ids"]) for x in ("def f(", "The value of")}
    with serving(llama(asked, sampled)) as url:
        try: main(judge(url, *given, *more))
        except SystemExit as e: assert e.code == 1
    found, (_, *asked) = json.loads(capsys.readouterr().out), asked   # the first asks for ids
    assert found["differs"] == (sampled == "large") == (found["distance"] is None) == bool(found["witness"])
    assert found["rows"]["likeliest"] == found["rows"]["tokens"] == 64 and found["tokens"] <= 256
    assert {(body["model"], body["temperature"], body.get("seed")) for body in asked} == {
        ("b", 0, None), ("b", .9, None)}
    assert {tuple(body["prompt"]) for body in asked} == starts and found["path"] == "/completion"

def test_answers_come_in_the_order_of_the_requests():
    "The first request waits for the third, which is answered at the same time"
    third = threading.Event()
    def generate(prompt, n, seed):
        if seed == 2: third.set()
        assert third.wait(5)
        return [-seed]
    engine = bb.BlackBox(generate, at_once=3)
    assert [*engine.texts(((0,), 1, k) for k in range(5))] == [((0,), [-k]) for k in range(5)]

def ids(*new): return completions(lambda body: [*new, *[5]*body["max_tokens"]][:body["max_tokens"]])

def no_ids(path, body): return dict(data=[dict(id="mine")], choices=[dict(text="a")], content="a")

refusing = completions(lambda body: [5] if body["max_tokens"] == 1 else (400, "too\nlong"))

ending = completions(lambda body: [5])

WRONG = [   # words of the error, the server's answers, more of the command line
    ("which does not answer in JSON", lambda path, body: (200, "<html>")),
    ("refuses with status 401: no key", lambda path, body: (401, "no key")),
    ("model: got None, wanted one that the server lists: none", lambda path, body: dict(data=[])),
    ("model: got 'x', wanted one that the server lists: mine", ids(5), "--model", "x"),
    ("no token ids ('/v1/completions': text without ids; '/completion': text without ids)", no_ids),
    ("refuses with status 400: too long", refusing),
    ("server: got [512, ", ids(512)),
    ("server: got 1 tokens, the last of them [5], wanted 4, or an end token (0)", ending, "--n", "4"),
    ("the vocabulary is another one", completions(lambda body: [5]*body["max_tokens"], lambda ids: "other")),
    ("tokens: got 4, wanted more", ids(), "--n", "4", "--tokens", "4"),
    ("temperature: got 0, wanted more", ids(), "--temperature", "0"),
    ("top_p: got 2.0", ids(), "--top-p", "2"),
    ("concurrency: got 0", ids(), "--concurrency", "0"),
    ("prompts: got 'no/file'", ids(), "--prompts", "no/file"),
    ("prompts: got '/dev/null' without a text", ids(), "--prompts", "/dev/null"),
    ("target: got 'no/such/one'", ids(), "--target", "no/such/one"),
    ("draft: got 'no/such/one'", ids(), "--draft", "no/such/one"),
]

@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[0])
def test_what_is_wrong_is_one_line_and_status_2(capsys, row):
    words, reply, *more = row
    with serving(reply) as url: fails(capsys, words, *judge(url, *more))

def test_a_server_that_does_not_answer(capsys):
    with serving(ids()) as url: pass
    fails(capsys, f"url: got '{url}/v1/models', which does not answer", *judge(url))

def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="draft: got a vocabulary of 32 tokens, wanted the target's 512"):
        shared_vocabulary(raw_model("small"), small_llama())
