"""The parts of scripts/gpu-check. Standard library of Python 3.9 only."""
