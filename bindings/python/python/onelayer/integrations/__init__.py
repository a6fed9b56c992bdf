"""Plug-ins for engines that are written in Python. The engines import them, by entry points; the package itself never does."""
