"""Training on several ranks: their step, what they synchronise, and how the failure of one ends all."""
