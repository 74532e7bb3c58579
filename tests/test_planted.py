"A planted mistake is one operation of one function, whatever its layout; else nothing is planted"
import pytest

from planted import always, at_equality, given, instead, never, planted, without

def limit(x, most=3):
    "Twice a number below a limit"
    if (x < most) & (  # two conditions
            x >= 0):
        return max(x * 2, 0)
    x += 10
    return x

@pytest.mark.parametrize("change, two, three", [
    (instead("max(_, 0)", "-_"), -4, 13), (at_equality("_ < most"), 4, 6), (without("x < most"), 4, 6),
    (without("x += 10"), 4, 3), (given("max", "0", "7"), 7, 13), (always("_ & _1"), 4, 6),
    (never("x < most"), 12, 13)])
def test_a_change_is_made(change, two, three):
    assert (limit(2), limit(3)) == (4, 13)
    assert (planted(limit, change)(2), planted(limit, change)(3)) == (two, three)

@pytest.mark.parametrize("change, places", [
    (instead("y", "x"), 0), (without("x + 10"), 0), (instead("x", "0"), 5)])
def test_a_change_without_its_one_place_is_refused(change, places):
    with pytest.raises(ValueError, match=f"^change: got {places} places in limit, wanted one"):
        planted(limit, change)
