"""Windows, lanes, predictions and the reveal loop, which all estimators share."""
