"What a person runs: the table of systems, the tour, the benchmarks, the command line"
