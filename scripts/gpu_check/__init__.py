"""Modules of scripts/gpu-check. Only the standard library of Python 3.9."""
