"`python -m specref.gpu.bench`: the measurements of chapter 45b"
from specref.gpu.bench.measured import run

if __name__ == "__main__": run()
