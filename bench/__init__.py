"""Measurements that anybody can repeat: ``python -m bench.data`` for the data plane.

Nothing here starts an engine or needs a GPU. Each measurement is a function that returns a
:class:`bench.output.Table`; what is compared is measured in turn, in one run, and quoted as medians with their spread,
because a shared machine is never the same twice.
"""
