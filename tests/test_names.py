"Chapter 60a: names of models, pairs, and systems that are built on them"
import numpy as np, pytest, torch

from checkpoints import folder as folder, pair_of   # noqa: F811  a fixture
from specref import (autoregressive, embedded, HFModel, PackedLlama, prompts, Seeded, sequoia, SYSTEMS,
                     Tree, warp)
from specref.app import loading, paired
from specref.app.loading import ModelOptions, text_difference, fresh_copy, rounding_reach
from specref.models.embedded import corpus, raw_model
from specref.speed import causes
from specref.train.consistency import consistency_model
from specref.train.early_exit import trained_exit
from specref.train.registry import load_drafter
from specref.train.space import space_model

def test_a_name_is_the_embedded_model_and_a_path_the_folder(folder, monkeypatch, capsys):
    "Where a folder has the name of an embedded model or drafter, one line says which is meant"
    monkeypatch.chdir(folder)
    (folder/"eagle").mkdir(exist_ok=True)
    words = "specref: {0}: '{1}' is the embedded one; the folder is './{1}'\n"
    large = pair_of().target.model.config.hidden_size
    capsys.readouterr()
    assert pair_of(target="target", draft="draft").target.model.config.hidden_size == large
    assert capsys.readouterr().err == words.format("target", "target")
    for name in "./target", "target/", str(folder/"target"):
        assert pair_of(target=name, draft="draft").target.model.config.hidden_size == 32 != large
    assert pair_of(drafter="medusa").drafter.recipe == "medusa"
    assert not capsys.readouterr().err
    assert load_drafter("eagle").recipe == "eagle"
    assert capsys.readouterr().err == words.format("drafter", "eagle")
    with pytest.raises(ValueError, match="^drafter: got"): load_drafter("./eagle")

def test_a_pair_at_another_temperature_shares_the_weights():
    "Its target and its draft have the distributions of models loaded with that temperature"
    cold, ids = pair_of(top_k=5), (101, 262, 8)
    hot, want = cold.at(2.), pair_of(2., top_k=5)
    for role in "target", "draft":
        model = getattr(hot, role)
        assert model.model is getattr(cold, role).model and model.temperature == 2
        assert (model.law(ids) == getattr(want, role).law(ids)).all()
    assert hot.options == want.options and cold.target.temperature == 0
    own = pair_of(draft_temperature=.5).at(2.)
    assert (own.target.temperature, own.draft.temperature) == (2, .5)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_reaches_as_far_as_its_type(dtype):
    "A text in one pass and token by token: within the reach, which is at most 100 times as far"
    target, offs = PackedLlama(raw_model(dtype=dtype), check=False), []   # compiled, both are the same bits
    for ids in prompts("code", 2, 50):
        whole, steps = fresh_copy(target).logits(Tree(ids))[0], fresh_copy(target)
        for end in range(30, 51): last = steps.logits(Tree(ids[:end]))[0]
        offs.append(abs(whole - last).max() / abs(whole).max())
    assert max(offs) < rounding_reach(target, 1) < 100*max(offs)

def test_the_first_difference():
    "Both logits after the common text, and how far the smaller lies below the largest, in doubt or not"
    target, ids = embedded(), prompts("code", 1, 20)[0]
    z = target.logits(Tree((*ids, 5)))[0]
    best, second, last = (int(x) for x in np.argsort(z)[[-1, -2, 0]])
    found = text_difference(target, ids, (5, best, 1), (5, second, 1))
    assert (found.place, found.plain, found.other) == pytest.approx((1, z[best], z[second]))
    assert found.margin == pytest.approx(z[best] - z[second]) and not found.is_rounding
    assert found._replace(margin=found.reach).words.startswith("rounding at token 1")
    low = text_difference(target, ids, (5, last), (5, second))   # neither is the likeliest
    assert low.margin == pytest.approx(z[best] - z[last])

def test_a_system_without_a_model_is_built_once():
    "With new copies of the target; one with a draft model is built each time"
    for system, once in ("prompt lookup", True), ("speculative sampling", False):
        build = loading.system_builder(pair_of(), system, (1, 2, 3))
        (p, a), (q, b) = build(), build()
        assert p is not q and p.model is q.model and (a is b) == once

def test_every_system_decodes_the_same_text():
    "At temperature 0, on copies of the embedded pair; two systems tune the target, and decode as it does"
    pair, ids = pair_of(), (101, 262, 8)
    own = {"CLLM": consistency_model(), "SPACE": space_model()}
    plain = {name: autoregressive(HFModel(model, 0), ids, 6, Seeded(0)) for name, model in own.items()}
    for name in SYSTEMS:
        target, system = loading.build_system(pair, name, None if name == "autoregressive" else 2)
        wanted = plain.setdefault("autoregressive", system(target, ids, 6, Seeded(0)))
        assert system(target, ids, 6, Seeded(0)) == plain.get(name, wanted) and len(wanted) == 6, name

def test_a_pair_of_two_tokenizers_is_for_the_systems_that_translate(folder):
    "Its vocabularies are those of the models, and no other system is built on it"
    given = ModelOptions(target=str(folder/"target"), draft=str(folder/"letters"), temperature=0.)
    pair = loading.load_pair(given, "TLI")
    assert (pair.words.target.V, pair.words.draft.V) == (pair.target.V, pair.draft.V) == (512, 257)
    for system in loading.translators():
        target, built = loading.build_system(pair.at(1.), system, 2)
        assert built.drafter.models[0].model.temperature == target.temperature == 1
    with pytest.raises(ValueError, match="^system: got 'SpecHub', wanted one of universal"):
        loading.build_system(pair, "SpecHub")

SHARED = {"LayerSkip": 1e-9, "Kangaroo": .02}   # whose adapter reads some tokens twice

@pytest.mark.parametrize("system", SHARED)
def test_shared_layers_are_counted_once(monkeypatch, system):
    "On a clock that counts layer-tokens the predicted speed-up is that of the run, counted"
    pair, ids, made = pair_of(1.), tuple(range(200, 220)), []
    def source(pair, system):
        made.append(draft_source(pair, system))
        return made[-1]
    draft_source = loading.draft_source
    monkeypatch.setattr(loading, "draft_source", source)
    monkeypatch.setattr(causes, "perf_counter", lambda: sum(m.meter.layer_tokens for m in made[-1][:2]))
    costs = loading.measure_pair(pair, [ids], system)
    target, built = loading.build_system(pair, system, 3)
    text = built(target, ids, 4, Seeded(0))
    ledger = built(target, ids + text, 40, Seeded(1)).ledger   # the rows of the prompt are there
    counted = sum(meter.layer_tokens for meter in ledger.models.values())
    plain = ledger.num_emitted_tokens * pair.target.layers
    predicted = paired.predicted_speedup(pair, ids, ledger, costs, system)
    assert predicted == pytest.approx(plain / counted, rel=SHARED[system]) and costs.plain() == 24

def test_the_exit_that_was_best_where_it_was_trained():
    "LayerSkip's share of layers and its gamma, which another one overrides"
    exit, gamma = trained_exit()
    assert (exit, gamma) == (1, 1)
    for given, drafted in (None, gamma), (gamma + 2, gamma + 2):
        target, built = loading.build_system(pair_of(), "LayerSkip", given)
        assert (target.exit, built.drafter.gamma) == (exit * target.layers // 8, drafted)

def test_a_system_has_caches_of_its_own():
    "Two builds never share a cache"
    pair = pair_of()
    a, b = (loading.build_system(pair, "speculative sampling")[1].drafter.model for _ in range(2))
    assert a is not b and a.model is b.model

def test_each_model_has_its_warps():
    "The likeliest tokens keep their ratios; the draft has the target's warps where it has none"
    whole, cut = pair_of(1.), pair_of(1., top_k=3, draft_top_p=.5)
    ids = tuple(whole.tok.encode("def f(x):"))
    for role, cuts in ("target", dict(top_k=3)), ("draft", dict(top_k=3, top_p=.5)):
        model, law = getattr(cut, role), getattr(cut, role).law(ids)
        assert np.allclose(law, warp(np.log(getattr(whole, role).law(ids)), **cuts)) and sum(law > 0) <= 3
        assert (loading.fresh_copy(model).law(ids) == law).all()
    given = ModelOptions(temperature=.5, top_k=7, top_p=.9, draft_temperature=0., draft_top_p=1.)
    assert given.draft_warps() == dict(temperature=0., top_k=7, top_p=1.)

def test_what_ends_a_text(folder):
    "The tokenizer's end token, and those of the model's settings that the tokenizer has added"
    pair = pair_of(target=str(folder/"padded"))
    end, pad = pair.tok.eos_token_id, pair.tok.pad_token_id
    assert pair.stop == (end,)
    pair.target.model.generation_config.eos_token_id = [7, pad]
    assert set(pair.stop) == {end, pad}

def test_a_message_goes_through_the_chat_template(folder):
    pair = pair_of(target=str(folder/"letters"), draft=str(folder/"letters"), chat=True)
    assert pair.tok.decode(loading.encode_prompt(pair, "abc", pair.target, 1)) == "abc?"
    pair.tok.chat_template = "{{ nothing.at.all }}"
    with pytest.raises(ValueError, match="^chat: got a template that fails"):
        loading.encode_prompt(pair, "abc", pair.target, 1)

def test_a_tree_is_planned_from_what_was_measured(monkeypatch):
    "Sequoia's size is the best for the measured rates and costs, or gamma; each plan is made once"
    pair, asked = pair_of(), []
    def best(rates, costs, most, depth):
        asked.append((rates, costs))
        return 5, 3, 1.
    monkeypatch.setattr(loading, "best_size", best)
    monkeypatch.setattr(loading, "measure_pair", lambda *args: "costs")
    plan = loading.measured_plan(pair, (1, 2, 3, 4))
    def tree(gamma=None): return loading.build_system(pair, "Sequoia", gamma, plan=plan)[1].drafter.parent
    first, larger = tree(), tree(gamma=7)
    (rates, costs), = asked
    assert costs == "costs" and sorted(rates, reverse=True) == list(rates) and 0 < sum(rates) <= 1
    assert first == tree() == sequoia(rates, 5, 3)[0] and larger == sequoia(rates, 7, 6)[0]

def test_earlier_texts_are_the_corpus_in_the_tokens_of_the_model(folder):
    "Of another tokenizer too"
    for name in "target", "letters":
        tok = pair_of(target=str(folder/name)).tok
        texts = loading.earlier_text(tok=tok)
        whole = "".join(row["text"] for row in corpus())
        assert sum(map(len, texts)) > 10**5 and tok.decode(texts[0]) in whole
