"""The loops of several ranks: their step, what they synchronise, and what happens when one of them fails."""
