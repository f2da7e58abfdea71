"""Newton's law from orbits: do models that predict orbits find the force behind them? `docs/newton.md` has the method.

orbits -> model -> training (pre-train, then fine-tune on a few labelled systems) -> law (what do its forces obey?)
-> arms (every mechanism x start x labels x seed, as a queue that can be interrupted) -> report.
"""
