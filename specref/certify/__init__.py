"Testing losslessness: exact and statistical certificates, sequential tests, samplers, known bugs"
