"""The audit: what each hook changed, by version counters, identities and observed in-place operators.

`Trainer(audit=True)` attaches it to the plan; without it no call is wrapped. May import: util, engine, run.
"""
