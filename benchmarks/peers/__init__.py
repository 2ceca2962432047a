"""The parts of `python -m benchmarks vs_peers`: Loragate beside other servers."""
