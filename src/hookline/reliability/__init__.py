"""What a run does about signals, hangs and slow loaders, and the summary that it leaves.

It observes the run; the loops decide. May import: util, engine, distributed, run, checkpoint.
"""
