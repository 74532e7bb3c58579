"Testing losslessness: exact and statistical certificates, sequential tests of a running engine, other people's samplers, known bugs"
