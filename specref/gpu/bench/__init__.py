"Measurements on a GPU; `python -m specref.gpu.bench --out DIR` runs them all"
