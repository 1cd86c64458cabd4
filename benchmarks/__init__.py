"""Measurements of zeropage beside DeepSpeed stage 3, FSDP2 and DDP: `python -m benchmarks --help`.

`fleet` starts each competitor as processes of its own (`rank`), which stay alive and work only when told, so that
competitors alternate within seconds. `measure` turns what they saw into medians, spreads and ratios; `report` into
a table and a picture. A piece (`pieces`) says what is measured of whom.
"""
