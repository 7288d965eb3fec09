"""The paper's figures and benchmarks of others, run with `fednmap`: a file per figure, with a verdict on its claims."""
