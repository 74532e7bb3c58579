"What the tests share: the theorem marker, strategies for laws and models, statistics with stated error rates"
import numpy as np
import pytest


def proves(*anchors):
    "Marks a test as the evidence for the theorems with these anchors"
    return pytest.mark.proves(*anchors)
