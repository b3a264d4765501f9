"""How the benchmarks measure: clocks, floors, baselines, profiles."""
