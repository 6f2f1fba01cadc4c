"""Load generation, benchmarks and the simulator."""
