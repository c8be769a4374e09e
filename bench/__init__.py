"""Measurements: a server or the engine under load, and the engine beside others."""
