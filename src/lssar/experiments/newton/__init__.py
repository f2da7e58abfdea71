"""Newton's law from orbits: do models that predict orbits find the force behind them? `docs/newton.md` has the method.

orbits -> model -> training (pre-train, then fine-tune on a few labelled systems) -> law (what do its forces obey?)
-> families (every mechanism x start x labels x seed) -> arms, sweep (a queue to be interrupted) -> results, report
"""
