"""Where training time is lost: findings of a run from its figures, with evidence and advice."""
