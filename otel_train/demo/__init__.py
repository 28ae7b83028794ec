"""A training script of the kind otel_train is for."""
