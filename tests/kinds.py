"Values that an argument of a kind must refuse: a whole number, a number of a range, a rate"
from math import inf, nan

def at_least(least): return least - 1, least + .5, True, nan, None, "x"
def number(low, high=inf): return low - .1, inf, nan, True, None, "x", *([high + .1] if high < inf else [])
RATE = 0, 1, -1, 2, nan, None
