"`python -m specref.gpu.bench`: the measurements of chapter 45"
from specref.gpu.bench.device import run

if __name__ == "__main__": run()
