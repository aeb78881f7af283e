"""The command line. One file per command: parse, call, print.

Commands import what they call when they are called, so that help and completion do not wait for the training's imports.
"""
