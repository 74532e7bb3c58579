"Chapter 16b: a false-alarm rate is divided among the tests that are planned, and none is made beside them"
import pytest
from hypothesis import given, strategies as st

from helpers import laws, proves
from specref import law_of
from specref.certify.level import SharedLevel

@proves("prop-level")
@given(laws(5), st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=5))
def test_any_of_the_tests_fails(law, failing):
    "On one outcome, exactly: not above the sum of the rates, and equal to it where the tests do not overlap"
    rates = [sum(law[x] for x in fails) for fails in failing]
    some = law_of(lambda rng: rng.pick(law)).of(lambda x: any(x in fails for fails in failing)).get(True, 0)
    assert max(rates) <= some <= len(rates)*max(rates)
    assert (some == sum(rates)) is (sum(law[x] for x in set().union(*failing)) == sum(rates))

def test_a_test_more_raises():
    level = SharedLevel(.2, counts=3, bets=1, none=0)
    assert level.rate == .05 and level.limit == 20 and level.take("counts", 2) == level.take("bets") == .05
    for part, tests in ("counts", 2), ("bets", 1), ("none", 1), ("unknown", 1):
        with pytest.raises(ValueError, match=f"^{part}: got {tests} more"): level.take(part, tests)
    assert level.take("counts") == .05
