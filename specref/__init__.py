"Speculative decoding: every way derived, run, and checked against its law"
__version__ = "0.1.0"
