"""Fixed workloads as files: what clients ask, how much and when. `loadgen replay NAME` and `loadgen synth NAME` take them."""
