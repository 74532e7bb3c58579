"Chapter 50b: what is exported loads as the same network; counts of servers are the ledger's"
import io, json
from pathlib import Path

import pytest, torch

from specref import generate, NgramModel, PromptLookup, reject, Seeded
from specref.app.commands import main
from specref.models.embedded import raw_model
from specref.serve.servers import SERVERS, export_drafter, read_metrics
from specref.train.checkpoints import LAYOUTS, from_folder
from specref.train.harness import TargetModel
from specref.train.registry import load_network

DRAFTERS = {"eagle": "eagle", "eagle31": "eagle3", "dflash": "dflash"}

@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_export(server, name, tmp_path, capsys):
    "The drafter is read back from the format that the server reads; the options name it, and the length"
    export_drafter(name, server, tmp_path/"out", gamma=5)
    entries = dict(line.split(": ", 1) for line in (tmp_path/"out/serve.yaml").read_text().splitlines())
    options = {key: json.loads(value) for key, value in entries.items()}
    assert str(tmp_path/"out/serve.yaml") in capsys.readouterr().out.splitlines()[-1]
    how, drafter = SERVERS[server][0][name], str(tmp_path/"out/drafter")
    assert drafter in str(options) and DRAFTERS[name] == how.method.lower()
    options |= json.loads(options.get("speculative-config", "{}"))
    assert options.get("num_speculative_tokens", options.get("speculative-num-draft-tokens", 0) - 1) == 5
    net = from_folder(Path(drafter), LAYOUTS[how.layout], TargetModel(raw_model("target")))
    mine = load_network(name).state_dict()
    assert all(torch.equal(w, mine[k].to(w.dtype)) for k, w in net.state_dict().items())

def test_a_block_is_exported_whole(tmp_path):
    "The length is by default that of the block of masks, and not more"
    export_drafter("dflash", "vllm", tmp_path/"out")
    assert '\\"num_speculative_tokens\\": 7' in (tmp_path/"out/serve.yaml").read_text()
    with pytest.raises(ValueError, match="^gamma: got 8"):
        export_drafter("dflash", "vllm", tmp_path/"longer", gamma=8)

def prometheus(engine, **counts):
    def line(name, value, more=""):
        return f'vllm:spec_decode_num_{name}_total{{engine="{engine}"{more}}} {value}.0\n'
    places = counts.pop("places", ())
    return "".join(line(*item) for item in counts.items()) + "".join(
        line("accepted_tokens_per_pos", k, f',position="{i}"') for i, k in enumerate(places))

FIRST = prometheus(0, drafts=10, draft_tokens=20, accepted_tokens=9, places=(6, 3))
LATER = prometheus(0, drafts=30, draft_tokens=60, accepted_tokens=33, places=(20, 13))
OTHER = prometheus(1, drafts=10, draft_tokens=20, accepted_tokens=12, places=(7, 5))

def test_counts():
    "Engines are added, an earlier reading is subtracted, other lines and empty ones are passed over"
    found = read_metrics(f"# HELP x\n\n{LATER}{OTHER}vllm:num_requests_running 3\n")
    assert (found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (40, 80, 45)
    assert found["acceptance_rate_per_position"] == (27/40, 18/40)
    assert found["mean_acceptance_length"] == 1 + 45/40 == 1 + sum(found["acceptance_rate_per_position"])
    since = read_metrics(LATER, before=FIRST)
    assert since["num_drafts"] == 20 and since["draft_acceptance_rate"] == 24/40
    two = 'sglang:spec_accept_length{a="1"} 3.0\nsglang:spec_accept_length{a="2"} 2.0\n'
    assert read_metrics(two) == dict(mean_acceptance_length=2.5)

def test_the_ledgers_own_metrics():
    "Read back they are the ledger's numbers, with rounds without a draft and a text that ends inside one"
    cycle = NgramModel([0, 1, 2, 3] * 20, 4, 3)
    run = generate(cycle, PromptLookup(4), reject, (0, 1, 2, 3), 30, Seeded(0))
    ledger, found = run.ledger, read_metrics(run.ledger.prometheus(model_name="mine"))
    assert ledger.num_drafts < ledger.num_rounds and ledger.rounds[-1].accepted == ledger.rounds[-1].emitted
    told = ledger.to_dict() | dict(acceptance_rate_per_position=tuple(ledger.acceptance_rate_per_position))
    assert found == {name: told[name] for name in found} and "num_emitted_tokens" in found

def test_from_a_shell(tmp_path, monkeypatch, capsys):
    (tmp_path/"first").write_text(FIRST)
    monkeypatch.setattr("sys.stdin", io.StringIO(LATER))
    main(["metrics", "--before", str(tmp_path/"first")])
    assert json.loads(capsys.readouterr().out)["num_drafts"] == 20
    main(["export", "eagle", "--for", "vllm", "--out", str(tmp_path/"new")])
    assert (tmp_path/"new/drafter/config.json").exists()
