"""Plug-ins for engines written in Python. Engines import them by entry points; the package never does."""
