"""Compiler passes, one a file, applied in the order of compile/pipeline.py.

Each is a named Relax module pass that rewrites any block of its pattern, keeps the meaning, and
notes in the module what it did (see `report`).
"""
