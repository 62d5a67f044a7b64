"""Windows, lanes, predictions, and the loop that reveals them: every estimator is made of these."""
